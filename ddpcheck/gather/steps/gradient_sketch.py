"""Sketches of gradients: a few numbers that are linear in the gradient and have its size.

The sketch of the average of the ranks' gradients is the average of their sketches, so what a reducer has left can be
compared with the average of what went in, later and elsewhere, without a collective and without keeping a gradient.

Each number is the sum of a block of elements with random signs (Alon, Matias and Szegedy, "The space complexity of
approximating the frequency moments", 1996): the expected square of its norm is that of the gradient's norm.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from ddpcheck.gather.state.tensor_values import plain_values

SIZE = 64
"""How many blocks there are at least; their estimate of a norm is within some 25 %."""

_SMALL = 1 << 14  # elements of a gradient up to which it is sketched together with others of its size
_SEED = 20231
_KEPT = 4096  # signs; longer ones are made afresh, so that nothing large stays on a device


def sketch(gradient: torch.Tensor) -> torch.Tensor:
    """A sketch of a tensor: a vector of at most `SIZE` + 1 elements, in float32 at least."""
    wide = _wide(gradient.dtype)
    parts = plain_values(gradient) or (torch.zeros(0),)  # without values: of no size
    parts = tuple(torch.view_as_real(part) if part.is_complex() else part for part in parts)
    flat = torch.cat([part.reshape(-1).to(wide) for part in parts]) if len(parts) > 1 else parts[0].reshape(-1).to(wide)
    return _of_rows(flat.unsqueeze(0))[0]


@dataclass(slots=True)
class Kept:
    """What is kept of a gradient until its step has ended: a copy of a small one, else its sketch."""

    value: torch.Tensor
    is_sketch: bool

    @classmethod
    def of(cls, gradient: torch.Tensor) -> Kept:
        """Keep it."""
        if not _is_small(gradient):
            return cls(sketch(gradient), is_sketch=True)
        return cls(gradient.detach().to(_wide(gradient.dtype), copy=True), is_sketch=False)

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.value + other.value, self.is_sketch)


def sketches(gradients: Mapping[str, torch.Tensor] | Mapping[str, Kept]) -> dict[str, tuple[float, ...]]:
    """The sketch of each, as `sketch` gives it but for rounding, with one transfer from each device.

    Small ones of one size are taken together: on a small model that saves most of the calls.
    """
    rows: list[tuple[Sequence[str], torch.Tensor]] = []
    alike: dict[tuple[Hashable, ...], dict[str, torch.Tensor]] = {}
    for name, given in gradients.items():
        value, is_sketch = (given.value, given.is_sketch) if isinstance(given, Kept) else (given.detach(), False)
        if is_sketch or not (isinstance(given, Kept) or _is_small(value)):
            rows.append(([name], (value if is_sketch else sketch(value)).unsqueeze(0)))
        else:
            alike.setdefault((value.numel(), value.dtype, value.device), {})[name] = value
    rows += [([*group], _of_rows(_stacked([*group.values()]))) for group in alike.values()]
    found: dict[str, tuple[float, ...]] = {}
    for device in {row.device for _, row in rows}:
        here = [(names, row.double()) for names, row in rows if row.device == device]
        numbers = iter(torch.cat([row.reshape(-1) for _, row in here]).tolist())
        found |= {name: tuple(islice(numbers, row.shape[1])) for names, row in here for name in names}
    return {name: found[name] for name in gradients}


def _is_small(value: torch.Tensor) -> bool:
    """Whether it is taken together with others of its size."""
    is_plain = type(value) is torch.Tensor and value.layout == torch.strided and value.device.type != "meta"
    return is_plain and value.numel() <= _SMALL and not (value.is_complex() or value.is_nested or value.is_quantized)


def _stacked(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([value.reshape(-1) for value in values]).to(_wide(values[0].dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _of_rows(rows: torch.Tensor) -> torch.Tensor:
    """The sketch of each row."""
    length = max(1, rows.shape[1] // SIZE)
    signs = _signs(length, rows)
    whole = rows.shape[1] // length * length
    blocks = rows[:, :whole].reshape(len(rows), -1, length) @ signs
    rest = rows[:, whole:] @ signs[: rows.shape[1] - whole]
    return torch.cat([blocks, rest.unsqueeze(1)], 1)


def _signs(count: int, like: torch.Tensor) -> torch.Tensor:
    """As many random signs, the same on every rank and without a touch of the generators of the script."""
    make = _known_signs if count <= _KEPT else _known_signs.__wrapped__
    return make(count, like.device, like.dtype)


@functools.lru_cache(maxsize=256)
def _known_signs(count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(_SEED)
    return torch.randint(0, 2, (count,), generator=generator, device=device).to(dtype) * 2 - 1
