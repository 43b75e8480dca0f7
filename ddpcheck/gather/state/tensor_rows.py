"""Small tensors of one shape as rows of one tensor: on a model of many small layers that saves most of the calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from ddpcheck.gather.state.tensor_values import PLAIN, has_memory

_SMALL = 1 << 16  # bytes of a tensor up to which it is taken together with others
_TOGETHER = 1 << 22  # bytes that are taken together


class Rows(NamedTuple):
    """Tensors with as many elements, of one dtype, on one device: a row each, by name."""

    names: Sequence[str]
    values: torch.Tensor


def in_rows(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[Rows], dict[str, torch.Tensor]]:
    """Copies of the small tensors among these, and the others by name: large ones, empty ones, those of other kinds."""
    alike: dict[tuple[Any, ...], list[tuple[str, torch.Tensor]]] = {}
    others: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if is_small(tensor):
            alike.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append((name, tensor))
        else:
            others[name] = tensor
    found = []
    with torch.no_grad():
        for group in alike.values():
            count, left = max(1, _TOGETHER // group[0][1].nbytes), iter(group)
            while some := list(islice(left, count)):
                names, values = zip(*some, strict=True)
                found.append(Rows(names, torch.stack(values).reshape(len(some), -1)))
    return found, others


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor is taken together with others."""
    return (
        type(tensor) in PLAIN
        and tensor.layout == torch.strided
        and 0 < tensor.nbytes <= _SMALL
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and has_memory(tensor)
    )


def numbers_of(found: Iterable[tuple[Sequence[str], torch.Tensor]]) -> dict[str, tuple[Any, ...]]:
    """What is found of rows, as many numbers of each, by name, with one transfer from each device; of one dtype."""
    by_device: dict[torch.device, list[tuple[Sequence[str], torch.Tensor]]] = {}
    for names, values in found:
        by_device.setdefault(values.device, []).append((names, values))
    numbers: dict[str, tuple[Any, ...]] = {}
    for several in by_device.values():
        together = torch.cat([values.reshape(-1) for _, values in several]).cpu()
        parts = together.split([values.numel() for _, values in several])
        for (names, _), part in zip(several, parts, strict=True):
            numbers |= zip(names, map(tuple, part.view(len(names), -1).tolist()), strict=True)
    return numbers
