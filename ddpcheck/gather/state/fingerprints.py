"""Tensor values of any layout, small tensors in batches, and fingerprints across ranks."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

PLAIN = (torch.Tensor, nn.Parameter)  # tensor types that store their values themselves


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` is a `DTensor` (shard or replica on this rank)."""
    if type(tensor) in PLAIN:
        return False
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor is not None and isinstance(tensor, dtensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached view of `tensor`, or of the local tensor of a `DTensor`."""
    detached: Any = tensor.detach()
    local: torch.Tensor = detached.to_local() if is_dtensor(detached) else detached
    return local


def plain_values(tensor: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Return the values of `tensor` as dense tensors, or None if not readable.

    A nested tensor gives several tensors, and a `DTensor` its local values: full values may need a collective. Meta and
    fake tensors, tensors with freed storage, and subclasses without the operations used here are not readable, and are
    compared by shape and dtype.
    """
    try:
        value = local_part(tensor)
        if is_plain(value):  # fast path
            return (value,) if has_memory(value) else None
        if value.is_nested:
            parts = [plain_values(part) for part in value.unbind()]
            return None if any(part is None for part in parts) else tuple(p for part in parts for p in part or ())
        if value.layout != torch.strided:
            value = value.to_dense() if value.layout != torch.sparse_coo else value.coalesce().to_dense()
        if value.is_quantized:
            value = value.int_repr()
        value = value.resolve_conj().resolve_neg()
        return (value,) if has_memory(value) else None
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, AssertionError):  # operation not supported by torch or the subclass
        return None


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True for a strided tensor: no subclass, not nested, quantized, conjugated or negated."""
    if type(tensor) not in PLAIN or tensor.layout != torch.strided:
        return False
    return not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def has_memory(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` can be read: reading freed or missing storage crashes."""
    if tensor.is_meta:
        return False
    if type(tensor) not in PLAIN:
        if isinstance(tensor, torch._subclasses.FakeTensor):
            return False
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return True  # wrapper subclass: its operations raise if not readable
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + count) * tensor.element_size() if count else 0
    return tensor.untyped_storage().nbytes() >= needed


def storage_address(tensor: torch.Tensor) -> int:
    """Return an address that views may share: `data_ptr()`, or `id` if not dense."""
    has_address = type(tensor) in PLAIN and tensor.layout == torch.strided and has_memory(tensor)
    return tensor.data_ptr() if has_address else id(tensor)


def version_counter(tensor: torch.Tensor) -> int:
    """Return the in-place version counter of a tensor; -1 for inference tensors."""
    return -1 if tensor.is_inference() else tensor._version


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of `tensor`, with -1 for ragged sizes of nested tensors."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    sizes = [-1] * tensor.dim()
    for dim in range(tensor.dim()):
        try:
            size = tensor.size(dim)
            sizes[dim] = size if type(size) is int else -1
        except RuntimeError:  # ragged
            continue
    return tuple(sizes)


_storage_kind = attrgetter("dtype", "layout", "is_nested", "is_meta")
_READABLE = {  # no quantized dtypes; no complex dtypes, which may be conjugated
    (getattr(torch, name), torch.strided, False, False)
    for name in "float32 bfloat16 float16 float64 int64 int32 int16 int8 uint8 bool".split()
}
_SMALL = 1 << 16  # max bytes of a tensor that is batched with others
_MOST_STACKED_BYTES = 1 << 22  # max bytes per batch
_NamedRows = tuple[Sequence[str], torch.Tensor]  # names, and one row of numbers per name


class Rows(NamedTuple):
    """Tensors of equal shape, dtype and device, stacked as rows, by name."""

    names: Sequence[str]
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class StackedTensors:
    """Tensors by name: small tensors stacked in `rows`, the other tensors in `others`."""

    names: Sequence[str]
    rows: list[Rows]
    others: dict[str, torch.Tensor]


def stack_small(tensors: Mapping[str, torch.Tensor] | StackedTensors) -> StackedTensors:
    """Stack the small tensors into rows; return a `StackedTensors` unchanged."""
    if isinstance(tensors, StackedTensors):
        return tensors
    others = {name: tensor for name, tensor in tensors.items() if not is_small(tensor)}
    small = {name: tensor for name, tensor in tensors.items() if name not in others} if others else tensors
    return StackedTensors([*tensors], stack_rows(small), others)


def stack_rows(small: Mapping[str, torch.Tensor]) -> list[Rows]:
    """Stack tensors, which must all satisfy `is_small`, into rows."""
    groups: dict[tuple[Any, ...], list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in small.items():
        groups.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append((name, tensor))
    rows = []
    with torch.no_grad():
        for group in groups.values():
            count, rest = max(1, _MOST_STACKED_BYTES // group[0][1].nbytes), iter(group)
            while chunk := list(islice(rest, count)):
                names, values = zip(*chunk, strict=True)
                rows.append(Rows(names, torch.stack(values).reshape(len(chunk), -1)))
    return rows


def is_small(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` is dense, readable, not empty and at most 64 KiB."""
    if type(tensor) not in PLAIN or _storage_kind(tensor) not in _READABLE or tensor.is_neg():
        return False
    size = tensor.nbytes
    if not 0 < size <= _SMALL:
        return False
    if tensor.is_contiguous():  # fast path
        return tensor.untyped_storage().nbytes() >= size + tensor.storage_offset() * tensor.itemsize
    return has_memory(tensor)


def numbers_of(rows: Iterable[_NamedRows]) -> dict[str, tuple[Any, ...]]:
    """Return each row's numbers as a tuple by name, with one transfer per device."""
    numbers: dict[str, tuple[Any, ...]] = {}
    for names, values in _transfer_to_cpu(rows):
        numbers |= zip(names, map(tuple, values.tolist()), strict=True)
    return numbers


def floats_of(rows: Iterable[_NamedRows]) -> dict[str, array[float]]:
    """Return the numbers of each row as a float32 `array` (little memory), by name."""
    numbers: dict[str, array[float]] = {}
    for names, values in _transfer_to_cpu((names, values.float()) for names, values in rows):
        flat, width = array("f", bytes(values.numel() * 4)), values.shape[1]
        torch.frombuffer(flat, dtype=torch.float32).copy_(values.reshape(-1))
        numbers |= {name: flat[index * width : (index + 1) * width] for index, name in enumerate(names)}
    return numbers


def _transfer_to_cpu(rows: Iterable[_NamedRows]) -> Iterator[_NamedRows]:
    by_device: dict[torch.device, list[_NamedRows]] = {}
    for names, values in rows:
        by_device.setdefault(values.device, []).append((names, values))
    for entries in by_device.values():
        together = torch.cat([values.reshape(-1) for _, values in entries]).cpu()
        parts = together.split([values.numel() for _, values in entries])
        for (names, _), part in zip(entries, parts, strict=True):
            yield names, part.view(len(names), -1)


_CHUNK = 1 << 19  # bytes per chunk; fits into the cache of a core
_MASK = (1 << 64) - 1


def digest_of(value: object) -> str:
    """Return a fixed-size digest of plain data, equal for equal data."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


def fingerprint(tensor: torch.Tensor) -> int:
    """Return a 64-bit fingerprint of the bits of `tensor`, computed on its device.

    Equal bits give equal fingerprints (so -0.0 and 0.0 differ, and a NaN equals itself). The bytes are read as 64-bit
    words (zero-padded), folded so that no bit is only in the top position (where a product loses its weight),
    multiplied by pseudo-random odd weights per position, and summed modulo 2**64. For a tensor whose values are not
    readable (`plain_values`), shape and dtype are hashed.
    """
    values = plain_values(tensor)
    if values is not None and len(values) == 1:
        try:
            return _bit_digest(values[0])
        except (NotImplementedError, TypeError):  # operation not supported by a subclass
            values = None
    parts = None if values is None else [fingerprint(value) for value in values]
    return int(digest_of((parts, shape_of(tensor), str(tensor.dtype)))[:15], 16)


def fingerprints(tensors: Iterable[tuple[str, torch.Tensor]] | StackedTensors) -> dict[str, int]:
    """Return the `fingerprint` of each tensor by name; small tensors are batched."""
    grouped = tensors if isinstance(tensors, StackedTensors) else stack_small(dict(tensors))
    sums = numbers_of((names, sums_of_rows(values)) for names, values in grouped.rows)
    hashes = {name: fingerprint(tensor) for name, tensor in grouped.others.items()}
    for names, values in grouped.rows:
        size = values.shape[1] * values.element_size()
        hashes.update((name, _add_to_hash(size, *sums[name])) for name in names)
    return {name: hashes[name] for name in grouped.names}


def _bit_digest(value: torch.Tensor) -> int:
    octets = value.contiguous().view(-1).view(torch.uint8)
    total = octets.numel()
    for start in range(0, octets.numel(), _CHUNK):
        total = _add_to_hash(total, int(sums_of_rows(octets[start : start + _CHUNK].view(1, -1))))
    return total


def sums_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of the 64-bit words of each row, as in `fingerprint`."""
    octets = rows.view(torch.uint8)
    missing = -octets.shape[1] % 8
    if missing or octets.storage_offset() % 8:  # e.g. a view into a bucket; 8-byte words must be aligned
        octets = nn.functional.pad(octets, (0, missing))
    words = octets.view(torch.int64)
    mixed = words >> 32
    mixed &= 0xFFFFFFFF  # arithmetic shift: without the mask, a word collides with its complement
    mixed ^= words
    mixed *= _weights(words.device, words.shape[1])[: words.shape[1]]
    return mixed.sum(1)


def _add_to_hash(total: int, summed: int) -> int:
    return (total * 0x9E3779B97F4A7C15 + summed) & _MASK


_WEIGHTS: dict[torch.device, torch.Tensor] = {}


def _weights(device: torch.device, count: int) -> torch.Tensor:
    """Return at least `count` pseudo-random odd numbers, the same in every process."""
    weights = _WEIGHTS.get(device)
    if weights is None or len(weights) < count:
        index = torch.arange(1, (1 << max(count, 64).bit_length()) + 1, dtype=torch.int64, device=device)
        mixed = index * -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
        mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687  # splitmix64 constants
        weights = _WEIGHTS[device] = ((mixed ^ (mixed >> 27)) * -7723592293110705685) | 1
    return weights
