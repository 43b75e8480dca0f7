"""Collapsing the memory of the fork server into huge pages, so that a fork has fewer page tables to copy. Light."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

_CHUNK = 16 << 20  # bytes of memory to collapse at a time
_HUGE = 2 << 20
_MADV_COLLAPSE = 25


def collapse_memory(libc: ctypes.CDLL) -> Iterator[None]:
    """Collapse the memory of this process, a part at a time; older kernels refuse that."""
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, end in _own_memory():
        for address in range(start, end, _CHUNK):
            libc.madvise(address, min(_CHUNK, end - address), _MADV_COLLAPSE)
            yield


def _own_memory() -> list[tuple[int, int]]:
    """The parts of our memory that are ours alone and hold whole huge pages, from and to."""
    parts = []
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            lines = [line.split(maxsplit=5) for line in file]
    except OSError:
        return []
    for addresses, rights, _, _, _, *name in lines:
        if rights == "rw-p" and (not name or name[0].startswith(("[heap]", "[anon"))):
            start, end = (int(word, 16) for word in addresses.split("-"))
            start, end = -(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE
            if start < end:
                parts.append((start, end))
    return parts
