"""Sketches of gradients: a few numbers that are linear in the gradient and have its size.

The sketch of the average of the ranks' gradients is the average of their sketches, so what a reducer has left can be
compared with the average of what went in, later and elsewhere, without a collective and without keeping a gradient.

Each number is the sum of a block of elements with random signs (Alon, Matias and Szegedy, "The space complexity of
approximating the frequency moments", 1996): the expected square of its norm is that of the gradient's norm.
"""

from __future__ import annotations

import functools

import torch

from ddpcheck.gather.state.tensor_values import plain_values

SIZE = 64
"""How many blocks there are at least; their estimate of a norm is within some 25 %."""

_SEED = 20231
_KEPT = 4096  # signs; longer ones are made afresh, so that nothing large stays on a device


def sketch(gradient: torch.Tensor) -> torch.Tensor:
    """A sketch of a tensor: a vector of at most `SIZE` + 1 elements, in float32 at least."""
    wide = torch.float64 if gradient.dtype in (torch.float64, torch.complex128) else torch.float32
    parts = plain_values(gradient) or (torch.zeros(0),)  # without values: of no size
    parts = tuple(torch.view_as_real(part) if part.is_complex() else part for part in parts)
    flat = torch.cat([part.reshape(-1).to(wide) for part in parts]) if len(parts) > 1 else parts[0].reshape(-1).to(wide)
    length = max(1, flat.numel() // SIZE)
    signs = _signs(length, flat)
    whole = flat.numel() // length * length
    blocks = flat[:whole].view(-1, length) @ signs
    rest = flat[whole:]
    return torch.cat([blocks, (rest @ signs[: rest.numel()]).reshape(1)])


def _signs(count: int, like: torch.Tensor) -> torch.Tensor:
    """As many random signs, the same on every rank and without a touch of the generators of the script."""
    make = _known_signs if count <= _KEPT else _known_signs.__wrapped__
    return make(count, like.device, like.dtype)


@functools.lru_cache(maxsize=256)
def _known_signs(count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(_SEED)
    return torch.randint(0, 2, (count,), generator=generator, device=device).to(dtype) * 2 - 1
