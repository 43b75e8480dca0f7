"""Tensors in files, read one by one, and weak references invisible to torch.

Files have the second and third copy of a large model, which need not be in memory.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from weakref import getweakrefs, ref

import torch
from torch import nn

from ddpcheck.findings.errors import UsageError
from ddpcheck.gather.patching import patched
from ddpcheck.gather.state.fingerprints import PLAIN, has_memory, is_plain


def tensor_ref(tensor: torch.Tensor) -> Callable[[], Any]:
    """Return a callable weak reference to a tensor that does not make `swap_tensors` fail."""
    _patch_swap_tensors()
    return _TensorRef(tensor)


class _TensorRef:
    """Holder of a weakref to a tensor; drops the weakref during `swap_tensors`."""

    __slots__ = ("__weakref__", "_visible")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.refer_to(tensor)

    def __call__(self) -> Any:
        return self._visible and self._visible()

    def refer_to(self, tensor: torch.Tensor) -> None:
        self._visible: _VisibleRef | None = _VisibleRef(tensor)
        self._visible.holder = ref(self)


class _VisibleRef(ref[torch.Tensor]):
    __slots__ = ("holder",)
    holder: Callable[[], _TensorRef | None]


@functools.cache
def _patch_swap_tensors() -> None:
    patched(torch.utils, "swap_tensors", _drop_refs_during_swap)


def _drop_refs_during_swap(t1: torch.Tensor, t2: torch.Tensor) -> Iterator[None]:
    holders = [(holder, tensor) for tensor in (t1, t2) for holder in _holders_of(tensor)]
    for holder, _ in holders:
        holder._visible = None
    try:
        yield
    finally:
        for holder, tensor in holders:
            holder.refer_to(tensor)


def _holders_of(tensor: torch.Tensor) -> list[_TensorRef]:  # no weak reference may outlive this call
    holders = (weak.holder() for weak in getweakrefs(tensor) if isinstance(weak, _VisibleRef))
    return [holder for holder in holders if holder is not None]


LARGE = 1 << 28
"""Bytes of parameters from which copies of a model are kept in files. Ranks and single process then run in turn.

A check of a smaller model fits into memory, and is a third faster without files."""

_SMALL = 1 << 14  # smaller tensors (bytes) get no pages of their own
_PAGE = mmap.ALLOCATIONGRANULARITY
_M_MMAP_THRESHOLD, _RETURNED = -3, 1 << 18
_VALUES, _INDEX = "values", "index"


def is_large(module: nn.Module) -> bool:
    """Return True if CPU parameters have at least `LARGE` bytes; copies then use files."""
    parameters = [p for p in module.parameters() if type(p) in PLAIN and p.device.type == "cpu"]
    return sum(p.nbytes for p in parameters if p.layout == torch.strided and not p.is_nested) >= LARGE


class _TensorEntry(NamedTuple):
    start: int  # byte offset in the file
    elements: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class TensorWriter:
    """Writer of tensors into a folder; `add` replaces a tensor of the same name."""

    def __init__(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)  # existing mappings stay valid
        path.mkdir()
        self._path, self._file = path, (path / _VALUES).open("w+b")
        self._entries: dict[str, _TensorEntry] = {}
        self._small: dict[str, torch.Tensor] = {}

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        with self._file:
            if kind is None:
                index = ({name: tuple(entry) for name, entry in self._entries.items()}, self._small)
                torch.save(index, self._path / _INDEX)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor; a small or non-dense tensor is copied, and written on exit."""
        tensor = tensor.detach()
        if not is_dense(tensor) or tensor.nbytes < _SMALL:
            self._small[name] = tensor.clone()  # clone: a view would keep its whole storage alive
            return
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.contiguous()
        start = -(-self._file.seek(0, os.SEEK_END) // _PAGE) * _PAGE
        self._file.seek(start)
        try:
            self._file.write(memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())))
        except OSError as error:
            raise UsageError(
                f"the copies of a large model do not fit into {self._path.parent} ({error.strerror}); set TMPDIR to a "
                "folder with more room, on a disk"
            ) from error
        self._entries[name] = _TensorEntry(start, tensor.numel(), tensor.dtype, tuple(tensor.shape), tensor.stride())

    def get(self, name: str) -> torch.Tensor | None:
        entry = self._entries.get(name)
        if entry is None:
            return self._small.get(name)
        self._file.seek(entry.start)
        return _tensor_at(bytearray(self._file.read(entry.elements * entry.dtype.itemsize)), entry._replace(start=0))


class TensorFile(Mapping[str, torch.Tensor]):
    """Tensors in a folder by name, mapped copy-on-write.

    Access to a tensor releases the memory of the tensor accessed before, which is read again from the file if needed.
    `keep=True` disables the release, which would discard what is written to a tensor. Tensors that were not on the CPU
    are not mapped, but loaded to `device`.
    """

    def __init__(self, path: Path, *, keep: bool = False, device: torch.device | str = "cpu") -> None:
        self._small: dict[str, torch.Tensor]
        entries, self._small = torch.load(path / _INDEX, map_location=device, weights_only=True, mmap=True)
        self._entries = {name: _TensorEntry(*entry) for name, entry in entries.items()}
        self._keep, self._last = keep, ""
        with (path / _VALUES).open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if self._entries else None

    def __getitem__(self, name: str) -> torch.Tensor:
        self._release_last()
        if name not in self._entries:
            return self._small[name]
        self._last = name
        return _tensor_at(self._map, self._entries[name])

    def __iter__(self) -> Iterator[str]:
        yield from self._entries
        yield from self._small

    def __len__(self) -> int:
        return len(self._entries) + len(self._small)

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._small

    def _release_last(self) -> None:
        entry = self._entries.get(self._last)
        if self._map is not None and entry is not None and not self._keep and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, entry.start, entry.elements * entry.dtype.itemsize)


def save(tensors: Iterable[tuple[str, torch.Tensor]], path: Path) -> None:
    """Write tensors into a folder, one at a time."""
    with TensorWriter(path) as writer:
        for name, tensor in tensors:
            writer.add(name, tensor)


def kept_in_file(tensors: Iterable[tuple[str, torch.Tensor]], path: Path, *, keep: bool = False) -> TensorFile:
    """Write tensors into folder `path`, map the files, delete the folder, return the tensors."""
    save(tensors, path)
    file = TensorFile(path, keep=keep)
    shutil.rmtree(path)
    return file


def return_freed_memory() -> None:
    """Make this process return memory of freed tensors to the system; no-op without glibc.

    By default, glibc keeps freed blocks of up to 32 MiB (`M_MMAP_THRESHOLD` in mallopt(3)): for a large model, up to
    the size of all gradients.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _RETURNED)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` is on the CPU, plain (`is_plain`) and readable (`has_memory`)."""
    return tensor.device.type == "cpu" and is_plain(tensor) and has_memory(tensor)


def _tensor_at(buffer: object, entry: _TensorEntry) -> torch.Tensor:
    flat: torch.Tensor = torch.frombuffer(buffer, dtype=entry.dtype, count=entry.elements, offset=entry.start)
    return flat.as_strided(entry.shape, entry.stride)
