"""Values of tensors of any kind, many small ones at once too, and fingerprints: equal for equal ones on any rank."""

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

PLAIN = (torch.Tensor, nn.Parameter)  # the types of tensors that hold their values themselves


def is_shard(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a `DTensor`, of which a rank holds a shard or a replica."""
    if type(tensor) in PLAIN:
        return False
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor is not None and isinstance(tensor, dtensor)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, detached; of a `DTensor`, what this rank holds of it, in the same memory."""
    detached: Any = tensor.detach()
    local: torch.Tensor = detached.to_local() if is_shard(detached) else detached
    return local


def plain_values(tensor: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """The values of `tensor` as dense tensors: one, or those of a nested one's parts; none where there are none.

    Of a `DTensor` they are what this rank holds; an operation on the whole may be a collective.

    There are none on the meta device, in a fake tensor, in one whose memory has been freed, and in a subclass that does
    not compute what is asked of it here. Such tensors are compared by what they have: shape and dtype.
    """
    try:
        value = own_part(tensor)
        if is_plain(value):  # as nearly all are
            return (value,) if has_memory(value) else None
        if value.is_nested:
            parts = [plain_values(part) for part in value.unbind()]
            return None if any(part is None for part in parts) else tuple(one for part in parts for one in part or ())
        if value.layout != torch.strided:
            value = value.to_dense() if value.layout != torch.sparse_coo else value.coalesce().to_dense()
        if value.is_quantized:
            value = value.int_repr()
        value = value.resolve_conj().resolve_neg()
        return (value,) if has_memory(value) else None
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, AssertionError):  # what an operation raises that torch or a subclass lacks
        return None


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` is dense and stores its values itself, neither conjugated nor negated."""
    if type(tensor) not in PLAIN or tensor.layout != torch.strided:
        return False
    return not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements are there; to read those of a storage that was freed ends the process."""
    if tensor.is_meta:
        return False
    if type(tensor) not in PLAIN:
        if isinstance(tensor, torch._subclasses.FakeTensor):
            return False
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return True  # it holds others; an operation of it says so where it cannot be read
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + count) * tensor.element_size() if count else 0
    return tensor.untyped_storage().nbytes() >= needed


def place_of(tensor: torch.Tensor) -> int:
    """The address of the memory of a tensor, which others may share; of one without, as a sparse one, the object's."""
    has_address = type(tensor) in PLAIN and tensor.layout == torch.strided and has_memory(tensor)
    return tensor.data_ptr() if has_address else id(tensor)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor has been written in place; -1 for one of inference mode, of which torch does not know."""
    return -1 if tensor.is_inference() else tensor._version


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of `tensor`; -1 for a size that is not the same everywhere in it."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    sizes = [-1] * tensor.dim()
    for place in range(tensor.dim()):
        try:
            size = tensor.size(place)
            sizes[place] = size if type(size) is int else -1
        except RuntimeError:  # ragged
            continue
    return tuple(sizes)


_kind = attrgetter("dtype", "layout", "is_nested", "is_meta")
_READABLE = {  # not what is quantized, and not what is complex, which may be a conjugate
    (getattr(torch, name), torch.strided, False, False)
    for name in "float32 bfloat16 float16 float64 int64 int32 int16 int8 uint8 bool".split()
}
_SMALL = 1 << 16  # bytes of a tensor up to which it is taken together with others
_AT_ONCE = 1 << 22  # bytes that are taken together
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
    others = {name: tensor for name, tensor in tensors.items() if not is_small(tensor)}
    small = {name: tensor for name, tensor in tensors.items() if name not in others} if others else tensors
    return InRows([*tensors], rows_of(small), others)


def rows_of(small: Mapping[str, torch.Tensor]) -> list[Rows]:
    """Tensors for which `is_small` holds, in rows."""
    alike: dict[tuple[Any, ...], list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in small.items():
        alike.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append((name, tensor))
    found = []
    with torch.no_grad():
        for group in alike.values():
            count, left = max(1, _AT_ONCE // group[0][1].nbytes), iter(group)
            while some := list(islice(left, count)):
                names, values = zip(*some, strict=True)
                found.append(Rows(names, torch.stack(values).reshape(len(some), -1)))
    return found


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor is taken together with others: what can be read as it is. Asked of each, so by few questions."""
    if type(tensor) not in PLAIN or _kind(tensor) not in _READABLE or tensor.is_neg():
        return False
    size = tensor.nbytes
    if not 0 < size <= _SMALL:
        return False
    if tensor.is_contiguous():  # as nearly all are
        return tensor.untyped_storage().nbytes() >= size + tensor.storage_offset() * tensor.itemsize
    return has_memory(tensor)


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
    sums = numbers_of((names, sums_of_rows(values)) for names, values in given.rows)
    found = {name: fingerprint(tensor) for name, tensor in given.others.items()}
    for names, values in given.rows:
        size = values.shape[1] * values.element_size()
        found.update((name, _with_sum(size, *sums[name])) for name in names)
    return {name: found[name] for name in given.names}


def _of_bits(value: torch.Tensor) -> int:
    octets = value.contiguous().view(-1).view(torch.uint8)
    total = octets.numel()
    for start in range(0, octets.numel(), _CHUNK):
        total = _with_sum(total, int(sums_of_rows(octets[start : start + _CHUNK].view(1, -1))))
    return total


def sums_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each row, as `fingerprint` takes it."""
    octets = rows.view(torch.uint8)
    missing = -octets.shape[1] % 8
    if missing or octets.storage_offset() % 8:  # a view into a bucket, say: words of eight bytes must be aligned
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
