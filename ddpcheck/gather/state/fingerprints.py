"""Fingerprints of tensors, and digests of plain data: equal for equal values, on whatever rank they are computed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from ddpcheck.gather.state.tensor_rows import InRows, in_rows, numbers_of
from ddpcheck.gather.state.tensor_values import plain_values, shape_of

_CHUNK = 1 << 19  # bytes that are taken at once; half a megabyte stays in a core's cache
_MASK = (1 << 64) - 1


def digest_of(value: object) -> str:
    """A digest of fixed size of plain data, equal for equal data."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


def fingerprint(tensor: torch.Tensor) -> int:
    """A 64-bit fingerprint of the bits of `tensor`, computed where the tensor is.

    Equal bits give equal fingerprints (so -0.0 and 0.0 differ, and a NaN equals itself). The bits are taken eight
    bytes at a time (the last ones with zeros), folded so that no bit is only at the top (there a product forgets its
    weight), weighted by a pseudo-random odd number for each place, and summed modulo 2**64. Of a tensor without values
    that can be read (`plain_values`), shape and dtype count.
    """
    values = plain_values(tensor)
    if values is not None and len(values) == 1:
        try:
            return _of_bits(values[0])
        except (NotImplementedError, TypeError):  # of a subclass, which lacks an operation
            values = None
    parts = None if values is None else [fingerprint(value) for value in values]
    return int(digest_of((parts, shape_of(tensor), str(tensor.dtype)))[:15], 16)


def fingerprints(tensors: Iterable[tuple[str, torch.Tensor]] | InRows) -> dict[str, int]:
    """The fingerprint of each tensor by name, as `fingerprint` gives it; small tensors are taken together."""
    given = tensors if isinstance(tensors, InRows) else in_rows(dict(tensors))
    sums = numbers_of((names, _sums(values)) for names, values in given.rows)
    found = {name: fingerprint(tensor) for name, tensor in given.others.items()}
    for names, values in given.rows:
        size = values.shape[1] * values.element_size()
        found.update((name, _with_sum(size, *sums[name])) for name in names)
    return {name: found[name] for name in given.names}


def _of_bits(value: torch.Tensor) -> int:
    octets = value.contiguous().view(-1).view(torch.uint8)
    if octets.storage_offset() % 8:  # a view into a bucket, say: words of eight bytes must be aligned
        octets = octets.clone()
    total = octets.numel()
    for start in range(0, octets.numel(), _CHUNK):
        total = _with_sum(total, int(_sums(octets[start : start + _CHUNK].view(1, -1))))
    return total


def _sums(rows: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each row."""
    octets = rows.view(torch.uint8)
    if missing := -octets.shape[1] % 8:
        octets = nn.functional.pad(octets, (0, missing))
    words = octets.view(torch.int64)
    mixed = words >> 32
    mixed &= 0xFFFFFFFF  # the shift copies the sign, and would make a word look like its complement
    mixed ^= words
    mixed *= _weights(words.device, words.shape[1])[: words.shape[1]]
    return mixed.sum(1)


def _with_sum(total: int, summed: int) -> int:
    return (total * 0x9E3779B97F4A7C15 + summed) & _MASK


_WEIGHTS: dict[torch.device, torch.Tensor] = {}


def _weights(device: torch.device, count: int) -> torch.Tensor:
    """At least `count` pseudo-random odd numbers, the same in every process."""
    known = _WEIGHTS.get(device)
    if known is None or len(known) < count:
        index = torch.arange(1, (1 << max(count, 64).bit_length()) + 1, dtype=torch.int64, device=device)
        mixed = index * -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
        mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687  # the constants of splitmix64
        known = _WEIGHTS[device] = ((mixed ^ (mixed >> 27)) * -7723592293110705685) | 1
    return known
