"""What a rank holds, item by item, and how far its tensors are from another rank's: for `assert_same_on_all_ranks`.

Tensors stay where they are: a fingerprint of each is computed there, and values move only once every rank has said that
its own differ, in pieces of `_PIECE` bytes.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ddpcheck.gather.state.module_description import fingerprint
from ddpcheck.testing.assertions.replica_values import CompareOptions, Entry, RankValues, ValueDiff

_PIECE = 1 << 24
_PLAIN = (str, bytes, type(None), enum.Enum, torch.dtype, torch.layout, torch.device, torch.memory_format, slice, range)
_KEYS = (str, bytes, int, float, complex, bool, type(None), enum.Enum)
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

Item = tuple[str, str, Any]
"""Path, kind (of `Entry`) and a dense tensor, a number, a plain value or the number of items in a container."""


class IncomparableError(Exception):
    """Something that cannot be compared across ranks; the message says what, where and what to do."""


def items_of(value: Any) -> list[Item]:
    """Everything in `value` (a tensor, a number, a module or any nest of them), flat, in an order of its own.

    Raises:
        IncomparableError: There is something in it that has no values, or none that could be compared.
    """
    try:
        with torch.no_grad():
            return list(_walk(value, "", ()))
    except RecursionError:
        raise IncomparableError("the argument is nested too deeply; pass its tensors in a flat list") from None


def _walk(value: Any, path: str, inside: tuple[int, ...]) -> Iterator[Item]:
    if isinstance(value, torch.Tensor):
        yield from _walk_tensor(value, path)
    elif isinstance(value, nn.Module):
        held = [*value.named_parameters(), *value.named_buffers()]
        yield path, "module", len(held)
        for name, tensor in held:
            yield from _walk_tensor(tensor, f"{path}.{name}")
    elif isinstance(value, _PLAIN):
        yield path, "value", repr(value.type if isinstance(value, torch.device) else value)
    elif isinstance(value, bool | int | float | complex):
        kinds: tuple[Any, ...] = (bool, int, float, complex)
        plain = next(kind for kind in kinds if isinstance(value, kind))
        yield path, "number", plain(value)  # numpy's float64 is a float
    elif type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        yield from _walk_numpy(value, path)
    else:
        if id(value) in inside:
            raise IncomparableError(f"{_place(path)} contains itself")
        entries, kind = _entries(value, path)
        yield path, kind, len(entries)
        for key, entry in entries:
            yield from _walk(entry, f"{path}{key}", (*inside, id(value)))


def _entries(value: Any, path: str) -> tuple[list[tuple[str, Any]], str]:
    """What is in a container, with the way there, and what kind of container it is; a mapping has no order."""
    if isinstance(value, Mapping):
        strange = next((key for key in value if not isinstance(key, _KEYS) and not _is_plain_tuple(key)), None)
        if strange is not None:
            raise IncomparableError(
                f"{_place(path)} has a key of type {type(strange).__name__}, which other ranks cannot be asked for; "
                "use strings or numbers (optimizer.state_dict() and not optimizer.state)"
            )
        return sorted(((f"[{key!r}]", value[key]) for key in value), key=lambda entry: entry[0]), "mapping"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", getattr(value, name)) for name in value._fields], "named tuple"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        return [(f".{name}", getattr(value, name)) for name in fields], "dataclass"
    if isinstance(value, Sequence | Iterator) or type(value).__name__ == "deque":
        return [(f"[{index}]", entry) for index, entry in enumerate(value)], "sequence"
    raise IncomparableError(
        f"{_place(path)} is of type {type(value).__qualname__}, which cannot be compared across ranks; pass tensors, "
        "numbers, strings, None, modules, or lists, tuples, dicts and dataclasses of them"
    )


def _is_plain_tuple(key: Any) -> bool:
    return isinstance(key, tuple) and all(isinstance(part, _KEYS) for part in key)


def _place(path: str) -> str:
    return f"item {path.removeprefix('.')}" if path else "the argument"


def _walk_numpy(value: Any, path: str) -> Iterator[Item]:
    try:
        tensor = torch.from_numpy(value.copy()) if getattr(value, "ndim", 0) else torch.tensor(value.item())
    except Exception as error:
        raise IncomparableError(f"{_place(path)} is a numpy value that torch does not take: {error}") from None
    yield from _walk_tensor(tensor, path)


def _walk_tensor(tensor: torch.Tensor, path: str) -> Iterator[Item]:
    """The tensor, and the parts of which it consists where it is not dense."""
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise IncomparableError(f"{_place(path)} is lazy and has no values yet; run a forward pass first")
    if type(tensor).__module__.startswith("torch.distributed"):
        raise IncomparableError(
            f"{_place(path)} is a {type(tensor).__name__}, of which each rank holds a part; pass .full_tensor() or "
            ".to_local()"
        )
    if tensor.is_meta:
        raise IncomparableError(f"{_place(path)} is on the meta device and has no values")
    tensor = tensor.detach()
    yield path, "tensor", tensor
    if tensor.is_quantized:
        yield f"{path}.dequantize()", "tensor", tensor.dequantize()
    elif tensor.is_nested and tensor.layout != torch.jagged:
        for index, part in enumerate(tensor.unbind()):
            yield from _walk_tensor(part, f"{path}[{index}]")
    else:
        for name, part in _parts(tensor):
            yield f"{path}.{name}()", "tensor", part


def _parts(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    if tensor.layout == torch.strided:
        return []
    if tensor.layout == torch.sparse_coo:
        merged = tensor.coalesce()
        return [("indices", merged.indices()), ("values", merged.values())]
    if tensor.layout == torch.jagged:
        return [("offsets", tensor.offsets()), ("values", tensor.values())]  # type: ignore[attr-defined]  # of nested tensors
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [
            ("crow_indices", tensor.crow_indices()),
            ("col_indices", tensor.col_indices()),
            ("values", tensor.values()),
        ]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [
            ("ccol_indices", tensor.ccol_indices()),
            ("row_indices", tensor.row_indices()),
            ("values", tensor.values()),
        ]
    return [("to_dense", tensor.to_dense())]


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether the tensor itself has values, and not only its parts."""
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested


def account(items: Sequence[Item], options: CompareOptions, place: str, *, canonical: bool) -> RankValues:
    """Say what the items are, with a fingerprint of each tensor.

    Args:
        items: Of `items_of`.
        options: How they will be compared.
        place: The line that asked.
        canonical: Let values that are equal have the same bits: 0.0 and -0.0, and one NaN and another. Costs a copy,
            and matters only once bits differ.
    """
    with torch.no_grad():
        leaves = [_leaf(path, kind, value, options, canonical=canonical) for path, kind, value in items]
    return RankValues(options, tuple(leaves), place)


def _leaf(path: str, kind: str, value: Any, options: CompareOptions, *, canonical: bool) -> Entry:
    if kind == "number":
        return Entry(path, kind, value=value, nans=int(value != value))
    if kind != "tensor":
        return Entry(path, kind, value=value)
    whole = _is_whole(value)
    nans = _nans(value) if whole and not options.equal_nan else None
    count = 0 if nans is None else int(nans.count_nonzero())
    return Entry(
        path,
        kind,
        dtype=str(value.dtype).removeprefix("torch."),
        shape=tuple(int(size) for size in value.shape) if not value.is_nested else (value.size(0),),
        layout=str(value.layout).removeprefix("torch."),
        device=value.device.type,
        stride=tuple(value.stride()) if whole else (),
        fingerprint=fingerprint(_canonical(value) if canonical else value) if whole else 0,
        nans=count,
        first_nan=_unravel(int(nans.reshape(-1).int().argmax()), nans.shape) if nans is not None and count else (),
    )


def _nans(tensor: torch.Tensor) -> torch.Tensor | None:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    return torch.isnan(tensor.float() if tensor.dtype.itemsize == 1 else tensor)


def _canonical(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, equal ones with the same bits."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    real = (real.float() if real.dtype.itemsize == 1 else real) + 0.0  # -0.0 + 0.0 is 0.0
    return real.masked_fill_(torch.isnan(real), math.nan)


def _unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        flat, rest = divmod(flat, size)
        index.append(rest)
    return tuple(reversed(index))


# Values


def measure(tensor: torch.Tensor, source: int, options: CompareOptions, *, odd: bool, group: Any) -> ValueDiff | None:
    """Send the values of rank `source` to all ranks of `group`; how far `tensor` is from them where it is `odd`.

    A collective: every rank has said before that it holds a tensor of this shape and dtype here.

    Args:
        tensor: Dense; this rank's.
        source: The rank to measure against.
        options: Tolerances.
        odd: Whether this rank's values are others.
        group: Of the ranks.
    """
    own = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    carrier = _carrier(group)
    total = ValueDiff(elements=own.numel())
    with torch.no_grad():
        for start in range(0, own.numel(), step := max(_PIECE // own.element_size(), 1)):
            piece = own[start : start + step].clone().view(torch.uint8).to(carrier)
            mine = own[start : start + step].cpu()
            dist.broadcast(piece, src=source, group=group)
            if odd and not total.trouble:
                try:
                    total = _compare(total, mine, piece.cpu().view(own.dtype), options, start, tensor.shape)
                except Exception as error:  # the others go on and wait for this rank
                    total = ValueDiff(elements=own.numel(), trouble=f"{type(error).__name__}: {error}")
    return total if odd else None


def _carrier(group: Any) -> torch.device:
    """The device whose tensors the backend of `group` moves."""
    kinds = [pair.partition(":")[0] for pair in str(dist.get_backend_config(group)).split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])  # of several GPUs: the one that is in use


def _compare(
    total: ValueDiff, got: torch.Tensor, want: torch.Tensor, options: CompareOptions, start: int, shape: Sequence[int]
) -> ValueDiff:
    """`total` with one more piece of the tensor, which begins at element `start`."""
    exact_got, exact_want = (t.view(_SIGNED[t.dtype]) if t.dtype in _SIGNED else t for t in (got, want))
    wide = torch.complex128 if got.is_complex() else torch.float64
    left, right = got.to(wide), want.to(wide)
    nans = left.isnan() | right.isnan()
    distance = (left - right).abs()
    matches = (left == right) if got.is_floating_point() or got.is_complex() else (exact_got == exact_want)
    if not options.exact:
        matches |= (distance <= options.atol + options.rtol * right.abs()) & distance.isfinite()
    if options.equal_nan:
        matches |= left.isnan() & right.isnan()
    wrong = ~matches
    if not wide.is_complex and not got.is_floating_point():
        distance = torch.where(wrong, distance.clamp(min=1.0), distance)  # float64 has not all large integers
    count = int(wrong.count_nonzero())
    if not count:
        return total
    found = dataclasses.replace(
        total, mismatched=total.mismatched + count, nans=total.nans + int((wrong & nans).count_nonzero())
    )
    if not total.mismatched:
        found = dataclasses.replace(found, first=_unravel(start + int(wrong.int().argmax()), shape))
    counted = torch.where(wrong & ~nans, distance, -1.0)
    place = int(counted.argmax())
    if float(counted[place]) > found.absolute:
        one, other = got[place].item(), want[place].item()
        exact = abs(int(one) - int(other)) if isinstance(one, int) else float(counted[place])
        found = dataclasses.replace(found, absolute=exact, at=_unravel(start + place, shape), got=one, want=other)
    share = torch.where(counted >= 0, counted / right.abs(), -1.0)
    place = int(share.argmax())
    if float(share[place]) > found.relative:
        found = dataclasses.replace(found, relative=float(share[place]), relative_at=_unravel(start + place, shape))
    return found
