"""Small tensors of one shape as rows of one tensor: on a model of many small layers that saves most of the calls."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch

from ddpcheck.gather.state.tensor_values import PLAIN, has_memory

_STRIDED = torch.strided
_SMALL = 1 << 16  # bytes of a tensor up to which it is taken together with others
_TOGETHER = 1 << 22  # bytes that are taken together
_Found = tuple[Sequence[str], torch.Tensor]  # numbers of each of these, a row each


class Rows(NamedTuple):
    """Tensors with as many elements, of one dtype, on one device: a row each, by name."""

    names: Sequence[str]
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class InRows:
    """Tensors of which several things are computed: `rows` are copies of the small ones, and `others` are the rest."""

    names: Sequence[str]
    rows: list[Rows]
    others: dict[str, torch.Tensor]


def in_rows(tensors: Mapping[str, torch.Tensor] | InRows) -> InRows:
    """Put the small ones among these into rows, unless they are in rows."""
    if isinstance(tensors, InRows):
        return tensors
    alike: dict[tuple[Any, ...], list[tuple[str, torch.Tensor]]] = {}
    others: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
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
    return InRows([*tensors], found, others)


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor is taken together with others."""
    return (
        type(tensor) in PLAIN
        and tensor.layout is _STRIDED
        and 0 < tensor.nbytes <= _SMALL
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and has_memory(tensor)
    )


def numbers_of(found: Iterable[_Found]) -> dict[str, tuple[Any, ...]]:
    """What is found of rows, as many numbers of each, by name, with one transfer from each device; of one dtype."""
    numbers: dict[str, tuple[Any, ...]] = {}
    for names, values in _on_cpu(found):
        numbers |= zip(names, map(tuple, values.tolist()), strict=True)
    return numbers


def floats_of(found: Iterable[_Found]) -> dict[str, array[float]]:
    """The same as single precision, of which no number becomes an object of Python."""
    numbers: dict[str, array[float]] = {}
    for names, values in _on_cpu((names, values.float()) for names, values in found):
        flat, width = array("f", bytes(values.numel() * 4)), values.shape[1]
        torch.frombuffer(flat, dtype=torch.float32).copy_(values.reshape(-1))
        numbers |= {name: flat[place * width : (place + 1) * width] for place, name in enumerate(names)}
    return numbers


def _on_cpu(found: Iterable[_Found]) -> Iterator[_Found]:
    by_device: dict[torch.device, list[_Found]] = {}
    for names, values in found:
        by_device.setdefault(values.device, []).append((names, values))
    for several in by_device.values():
        together = torch.cat([values.reshape(-1) for _, values in several]).cpu()
        parts = together.split([values.numel() for _, values in several])
        for (names, _), part in zip(several, parts, strict=True):
            yield names, part.view(len(names), -1)
