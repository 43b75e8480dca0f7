"""Sketches of gradients: a few numbers that are linear in the gradient and have its size.

The sketch of the average of the ranks' gradients is the average of their sketches, so what a reducer has left can be
compared with the average of what went in, later and elsewhere, without a collective and without keeping a gradient.

Each number is the sum of a block of elements with random signs (Alon, Matias and Szegedy, "The space complexity of
approximating the frequency moments", 1996): the expected square of its norm is that of the gradient's norm.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ddpcheck.gather.state.tensor_rows import InRows, floats_of, in_rows, is_small, numbers_of
from ddpcheck.gather.state.tensor_values import plain_values

SIZE = 64
"""How many blocks there are at least; their estimate of a norm is within some 25 %."""

_SEED = 20231
_KEPT = 4096  # signs; longer ones are made afresh, so that nothing large stays on a device


def sketch(gradient: torch.Tensor) -> torch.Tensor:
    """A sketch of a tensor: a vector of at most `SIZE` + 1 elements, in float32 at least."""
    parts = plain_values(gradient) or (torch.zeros(0),)  # without values: of no size
    rows = [_flat(part.reshape(1, -1)) for part in parts]
    return _of_rows(torch.cat(rows, 1) if len(rows) > 1 else rows[0])[0]


@dataclass(slots=True)
class Kept:
    """What is kept of a gradient until its step has ended: a copy of a small one, else its sketch."""

    value: torch.Tensor
    is_sketch: bool

    @classmethod
    def of(cls, gradient: torch.Tensor) -> Kept:
        """Keep one, which is detached."""
        if gradient.is_complex() or not is_small(gradient):
            return cls(sketch(gradient), is_sketch=True)
        return cls(gradient.clone(), is_sketch=False)

    def __add__(self, other: Kept) -> Kept:
        wide = _wide(self.value.dtype)
        return Kept(self.value.to(wide) + other.value.to(wide), self.is_sketch)


@dataclass(slots=True)
class KeptParts:
    """What is kept of the parts of a gradient, each of which is reduced onto other ranks."""

    parts: list[Kept]

    @classmethod
    def of(cls, gradient: torch.Tensor, count: int, dim: int) -> KeptParts:
        """Keep so many parts of it, along a dimension, as `torch.chunk` makes them."""
        return cls([Kept.of(part) for part in gradient.chunk(count, dim)])

    def __add__(self, other: KeptParts) -> KeptParts:
        return KeptParts([one + more for one, more in zip(self.parts, other.parts, strict=True)])


def sketches(gradients: Mapping[str, torch.Tensor] | InRows) -> dict[str, tuple[float, ...]]:
    """The sketch of each, as `sketch` gives it but for rounding, with one transfer from each device.

    Small ones of one shape are taken together.
    """
    given = in_rows(gradients)
    found = numbers_of((names, value.double()) for names, value in _made(given))
    return {name: found[name] for name in given.names}


def short_sketches(gradients: InRows | Mapping[str, Kept]) -> dict[str, array[float]]:
    """The same in single precision, also of what is kept of gradients."""
    if isinstance(gradients, InRows):
        names, several = gradients.names, _made(gradients)
    else:
        names = [*gradients]
        several = _made(in_rows({name: one.value for name, one in gradients.items() if not one.is_sketch}))
        several += [((name,), one.value) for name, one in gradients.items() if one.is_sketch]
    found = floats_of(several)
    return {name: found[name] for name in names}


def _made(given: InRows) -> list[tuple[Sequence[str], torch.Tensor]]:
    several: list[tuple[Sequence[str], torch.Tensor]]
    several = [(names, _of_rows(_flat(values))) for names, values in given.rows]
    return several + [((name,), sketch(value)) for name, value in given.others.items()]


def _flat(rows: torch.Tensor) -> torch.Tensor:
    """Each row as real numbers, in float32 at least."""
    real = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
    return real.to(_wide(rows.dtype))


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
