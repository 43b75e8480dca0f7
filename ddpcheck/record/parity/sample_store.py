"""Per-rank files of batches and random draws, their concatenation, and the global batch size."""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import re
import struct
import sys
from argparse import Namespace
from collections import Counter, UserDict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import cat

from ddpcheck.findings.source_lines import file_of_class, file_of_module, is_of_program
from ddpcheck.record.source.program_numbers import program_frames

_LENGTHS = struct.Struct("<II")
_NAME = "samples-{}"
_LARGEST = 1 << 26  # max bytes of a rank's file
_LARGEST_VALUE = 1 << 24
_MIN_FREE = 1 << 25  # bytes kept free on the file system for the ranks' logs


class ConcatenationError(Exception):
    """Values of ranks that cannot be concatenated."""


class SampleWriter:
    """Writer of a rank's batches and random draws, in the order of their use."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._size = 0
        self.why_full = ""  # reason why recording stopped, '' while values are still recorded
        try:
            self._file = Path(folder, _NAME.format(rank)).open("wb", buffering=0)  # drops values of an earlier start
        except OSError as error:
            self.why_full = _reason(error)

    def add(self, key: str, value: Any) -> None:
        """Append a value, unless the file is full or pickling fails."""
        if self.why_full:
            return
        try:
            buffer = io.BytesIO()
            _Pickler(buffer, protocol=5).dump(value)
        except (pickle.PicklingError, TypeError, AttributeError, RuntimeError, NotImplementedError):
            return
        name, blob = key.encode(), buffer.getvalue()
        self._size += len(blob) + len(name)
        if len(blob) > _LARGEST_VALUE or self._size > _LARGEST:
            self.why_full = f"a rank keeps no more than {_LARGEST >> 20} MiB, and {_LARGEST_VALUE >> 20} MiB at a time"
            return
        system = os.fstatvfs(self._file.fileno())
        if system.f_bavail * system.f_frsize < _MIN_FREE + len(blob):
            self.why_full = f"fewer than {_MIN_FREE >> 20} MiB are free for temporary files"
            return
        record = _LENGTHS.pack(len(name), len(blob)) + name + blob
        try:
            written = self._file.write(record)
            if written < len(record):  # a partial write; the next write raises the error
                self._file.write(record[written:])
        except OSError as error:
            self.why_full = _reason(error)


def _reason(error: OSError) -> str:
    return f"their file could not be written: {os.strerror(error.errno or 0)}"


class SampleReader:
    """Reader of the recorded values of all ranks, by key."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self.world_size = world_size
        self._paths = [Path(folder, _NAME.format(rank)) for rank in range(world_size)]
        self._offsets = [_offsets_in(path) for path in self._paths]

    def get(self, key: str) -> list[Any]:
        """Return the values of a key in rank order, skipping ranks without a value."""
        values = []
        for path, offsets in zip(self._paths, self._offsets, strict=True):
            if key in offsets:
                start, size = offsets[key]
                with path.open("rb") as file:
                    file.seek(start)
                    values.append(pickle.loads(file.read(size)))
        return values

    def count(self, key: str) -> int:
        """Return the number of ranks with a value under a key."""
        return sum(key in offsets for offsets in self._offsets)


class _Pickler(pickle.Pickler):
    """Pickler of tensors as raw bytes, ten times faster than torch.save."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and value.layout == torch.strided and not value.is_quantized:
            plain = value.detach().cpu().contiguous().resolve_conj().resolve_neg()
            return _tensor_of, (plain.reshape(-1).view(torch.uint8).numpy().tobytes(), plain.dtype, tuple(plain.shape))
        return NotImplemented


def _tensor_of(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def _offsets_in(path: Path) -> dict[str, tuple[int, int]]:
    offsets: dict[str, tuple[int, int]] = {}
    if not path.exists():
        return offsets
    size = path.stat().st_size
    with path.open("rb") as file:
        while len(head := file.read(_LENGTHS.size)) == _LENGTHS.size:
            name, length = _LENGTHS.unpack(head)
            if file.tell() + name + length > size:  # the rank was killed while writing, or the disk was full
                break
            key = file.read(name).decode()
            offsets[key] = file.tell(), length
            file.seek(length, 1)
    return offsets


def join_ranks(values: Sequence[Any], *, is_whole: bool = False) -> Any:
    """Concatenate the values of all ranks along the batch dimension.

    If all values are equal, one value is returned instead, except with `is_whole`: the single process has a value with
    as many rows as all ranks together.

    Raises:
        ConcatenationError: The values have no batch dimension, or their other dimensions differ.
    """
    are_equal = not is_whole and all(is_same(values[0], value) for value in values[1:])
    return values[0] if are_equal else _concatenate(values)


def _concatenate(values: Sequence[Any]) -> Any:
    first = values[0]
    if len({type(value) for value in values}) > 1:
        raise ConcatenationError("their types differ")
    if isinstance(first, torch.Tensor) or type(first).__module__ == "numpy":
        if len({value.shape[1:] for value in values}) > 1:
            if isinstance(first, torch.Tensor) and (padded := _padded(values)):
                return torch.cat(padded)
            raise ConcatenationError(f"their shapes are {' and '.join(str(tuple(value.shape)) for value in values)}")
        if len(first.shape):
            return cat([*values]) if isinstance(first, torch.Tensor) else sys.modules["numpy"].concatenate([*values])
    elif isinstance(first, Mapping | UserDict):
        if any(value.keys() != first.keys() for value in values):
            raise ConcatenationError("their keys differ")
        parts = {key: _concatenate([value[key] for value in values]) for key in first}
        kind: Any = type(first)
        return kind(parts)
    elif isinstance(first, list) and first and isinstance(first[0], str | bytes | int | float | dict):
        return [item for value in values for item in value]  # one item per sample, as default_collate returns strings
    elif isinstance(first, list | tuple):
        if len({len(value) for value in values}) > 1:
            raise ConcatenationError("their lengths differ")
        items = [_concatenate(elements) for elements in zip(*values, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if all(is_same(first, value) for value in values[1:]):
        return first
    raise ConcatenationError(f"{type(first).__name__} has no batch dimension")


_PADDING = (-100, 0)  # labels, other tensors; fallback: the most frequent constant end of rows


def _padded(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Pad tensors of ranks to equal sizes; return [] if the padding is unknown."""
    shapes = [value.shape for value in values]
    if len({len(shape) for shape in shapes}) > 1 or not all(value.numel() for value in values):
        return []
    longest = [max(sizes) for sizes in zip(*(shape[1:] for shape in shapes), strict=True)]
    ends = Counter[float]()
    for dim in (dim for dim, size in enumerate(longest, 1) if any(shape[dim] < size for shape in shapes)):
        for row in (row for value in values for row in value.select(dim, -1)):
            ends.update({float(row.flatten()[0])} if bool((row == row.flatten()[0]).all()) else ())
    repeated = [value for value, count in ends.most_common() if count > 1]
    padding = next((value for value in (*_PADDING, *repeated) if value in ends), None)
    if padding is None:
        return []
    padded = []
    for value in values:
        full = value.new_full((len(value), *longest), int(padding) if not value.is_floating_point() else padding)
        full[tuple(map(slice, value.shape))] = value
        padded.append(full)
    return padded


def is_padded(value: Any, part: Any) -> bool:
    """Return True if sequences in concatenated `value` are longer than in one rank's `part`."""
    if isinstance(value, Mapping | UserDict):
        return any(is_padded(value[key], part[key]) for key in value)
    if isinstance(value, list | tuple) and isinstance(part, list | tuple):
        return any(map(is_padded, value, part))
    return isinstance(value, torch.Tensor) and value.shape[1:] != part.shape[1:]


def row_count(value: Any) -> int:
    """Return the row count of the first tensor or array, or 0."""
    if isinstance(value, Mapping | UserDict):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        return next((rows for item in value if (rows := row_count(item))), 0)
    shape: Any = getattr(value, "shape", ())
    return int(shape[0]) if len(shape) else 0


def is_same(first: Any, second: Any) -> bool:
    """Return True if two values are equal, tensors and arrays element by element."""
    if isinstance(first, torch.Tensor):
        return first.shape == second.shape and first.dtype == second.dtype and bool(torch.equal(first, second))
    if isinstance(first, Mapping | UserDict):
        return first.keys() == second.keys() and all(is_same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        pairs = zip(first, second, strict=False)
        return len(first) == len(second) and all(type(a) is type(b) and is_same(a, b) for a, b in pairs)
    if getattr(first, "shape", None) != getattr(second, "shape", None):
        return False
    equal = first == second
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


_BATCH_SIZE_NAME = re.compile(r"batch(?!es|_?idx|_?index|_?num)|(^|_)m?bsz?$|(samples|images|imgs)_per_", re.IGNORECASE)
_MOST = 4096  # max entries scanned per mapping or object
_DEEPEST = 3


def scale_batch_size(size: int, scaled: int) -> Iterator[str]:
    """Assign `scaled` to the program's batch-size variables whose value is `size`; yield their names."""
    seen = set[int]()
    for frame in program_frames():
        yield from _scale_all(frame.f_globals, size, scaled, "", seen)
        if frame.f_code.co_name == "<module>":
            continue
        for name, value in [*frame.f_locals.items()]:
            if _has_size(name, value, size):
                _assign_local(frame, name, scaled)
                yield name
            else:
                yield from _scale_inside(value, size, scaled, name, seen)


def _scale_all(variables: MutableMapping[Any, Any], size: int, scaled: int, path: str, seen: set[int]) -> Iterator[str]:
    if id(variables) in seen or len(variables) > _MOST:
        return
    seen.add(id(variables))
    for name, value in [*variables.items()]:
        full_path = f"{path}.{name}" if path else f"{name}"
        if _has_size(name, value, size):
            variables[name] = scaled
            yield full_path
        elif full_path.count(".") < _DEEPEST:
            yield from _scale_inside(value, size, scaled, full_path, seen)


def _scale_inside(value: Any, size: int, scaled: int, path: str, seen: set[int]) -> Iterator[str]:
    """Scale batch sizes in a mapping, namespace, or the program's own module or object."""
    kind = type(value)
    if issubclass(kind, MutableMapping):
        yield from _scale_all(value, size, scaled, path, seen)
    elif issubclass(kind, Namespace | SimpleNamespace) or is_of_program(
        file_of_module(value) if kind is ModuleType else file_of_class(kind)
    ):
        yield from _scale_all(getattr(value, "__dict__", {}), size, scaled, path, seen)


def _has_size(name: object, value: Any, size: int) -> bool:
    return type(value) is int and value == size and isinstance(name, str) and _BATCH_SIZE_NAME.search(name) is not None


def _assign_local(frame: FrameType, name: str, value: int) -> None:
    """Assign to a local variable (writes `f_locals` back before Python 3.13, PEP 667)."""
    frame.f_locals[name] = value
    ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
