"""Fingerprints of tensors, and digests of plain data: equal for equal values, on whatever rank they are computed."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from ddpcheck.gather.state.tensor_values import plain_values, shape_of

_CHUNK = 1 << 16  # words of eight bytes; half a megabyte stays in a core's cache
_SMALL = 1 << 15  # bytes of a tensor up to which it is taken together with others: that saves most of the calls
_TOGETHER = 1 << 22  # bytes that are taken together
_MASK = (1 << 64) - 1


def digest_of(value: object) -> str:
    """A digest of fixed size of plain data, equal for equal data."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


def fingerprint(tensor: torch.Tensor) -> int:
    """A 64-bit fingerprint of the bits of `tensor`, computed where the tensor is.

    Equal bits give equal fingerprints (so -0.0 and 0.0 differ, and a NaN equals itself). The bits are taken eight
    bytes at a time, folded so that no bit is only at the top (there a product forgets its weight), weighted by a
    pseudo-random odd number for each place, and summed modulo 2**64. Of a tensor without values that can be read
    (`plain_values`), shape and dtype count.
    """
    return _of_values(tensor, plain_values(tensor))


def fingerprints(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """The fingerprint of each tensor by name, as `fingerprint` gives it; small tensors are taken together."""
    found: dict[str, int] = {}
    small: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors:
        values = plain_values(tensor)
        alone = values[0] if values is not None and len(values) == 1 and type(values[0]) is torch.Tensor else None
        if alone is None or alone.numel() * alone.element_size() > _SMALL:
            found[name] = _of_values(tensor, values)
        else:
            found[name] = 0  # in its place, until it is known
            small.setdefault(alone.device, []).append((name, alone))
    for group in small.values():
        for some in _batches(group):
            found.update(zip((name for name, _ in some), _of_several([value for _, value in some]), strict=True))
    return found


def _batches(group: Sequence[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The same in parts of at most so many bytes."""
    some: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, value in group:
        size += value.numel() * value.element_size()
        if size > _TOGETHER and some:
            yield some
            some, size = [], value.numel() * value.element_size()
        some.append((name, value))
    yield some


def _of_values(tensor: torch.Tensor, values: tuple[torch.Tensor, ...] | None) -> int:
    if values is not None and len(values) == 1:
        try:
            return _of_bits(values[0])
        except (NotImplementedError, TypeError):  # of a subclass, which lacks an operation
            values = None
    parts = None if values is None else [fingerprint(value) for value in values]
    return int(digest_of((parts, shape_of(tensor), str(tensor.dtype)))[:15], 16)


def _of_bits(value: torch.Tensor) -> int:
    octets = _octets_of(value)
    if octets.storage_offset() % 8:  # a view into a bucket, say: words of eight bytes must be aligned
        octets = octets.clone()
    whole = octets.numel() // 8 * 8
    words = octets[:whole].view(torch.int64)
    weights = _weights(octets.device, min(_CHUNK, words.numel()))
    total = octets.numel()
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK]
        total = _with_words(total, int(_mixed(part, weights[: part.numel()]).sum()))
    return _with_octets(total, octets[whole:].tolist())


def _of_several(values: Sequence[torch.Tensor]) -> list[int]:
    """The fingerprints of small tensors on one device."""
    octets = list(map(_octets_of, values))
    counts = tuple(one.numel() // 8 for one in octets)
    words = torch.cat([one[: 8 * count] for one, count in zip(octets, counts, strict=True)]).view(torch.int64)
    weights, ends = _places(octets[0].device, counts)
    sums = torch.nn.functional.pad(_mixed(words, weights).cumsum(0), (1, 0))[ends].diff().tolist()
    rest = iter(torch.cat([one[8 * count :] for one, count in zip(octets, counts, strict=True)]).tolist())
    found = []
    for one, count, summed in zip(octets, counts, sums, strict=True):
        total = _with_words(one.numel(), summed) if count else one.numel()
        found.append(_with_octets(total, [next(rest) for _ in range(one.numel() - 8 * count)]))
    return found


def _octets_of(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def _mixed(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    mixed = words >> 32
    mixed &= 0xFFFFFFFF  # the shift copies the sign, and would make a word look like its complement
    mixed ^= words
    mixed *= weights
    return mixed


def _with_words(total: int, summed: int) -> int:
    return (total * 0x9E3779B97F4A7C15 + summed) & _MASK


def _with_octets(total: int, octets: Sequence[int]) -> int:
    for octet in octets:
        total = (total * 0x2545F4914F6CDD1D + octet + 1) & _MASK
    return total


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


@functools.lru_cache(maxsize=8)
def _places(device: torch.device, counts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of the words of several tensors, one after the other; and where each tensor begins, and the end."""
    weights = _weights(device, max(counts))
    ends = torch.tensor((0, *counts)).cumsum(0)
    return torch.cat([weights[:count] for count in counts]), ends.to(device)
