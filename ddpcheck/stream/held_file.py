"""The files that a rank writes, in a process that belongs to a script: one that may close what it does not know.

What is closed so, a daemon's `closerange` say, has its number given to the next file that the script opens. So a
descriptor is compared with what it was made for before each write, and a map never closes its own one.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

_HIGH = (4032, 960, 192)  # the numbers from which a descriptor is taken, as far as the limit of the process allows
_FLAGS = os.O_WRONLY | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)


class HeldFile:
    """A file to append to, open under a high number, so that the script's own ones have those that they would have."""

    def __init__(self, path: Path, on_open: Callable[[int], object] | None = None) -> None:
        """Make it; `on_open` is told the number of the descriptor, and again where that was lost."""
        self._path = str(path)
        self._on_open = on_open
        self._number = -1
        self._identity: tuple[int, int] | None = None
        path.touch()
        self.hold()

    def hold(self) -> int:
        """The descriptor, which is opened anew where the script has closed it.

        Raises:
            OSError: That cannot be done.
        """
        if self._identity is None or _identity(self._number) != self._identity:
            number = _under_high_number(os.open(self._path, _FLAGS))
            found = _identity(number)
            if self._identity not in (None, found):
                os.close(number)
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._path)
            self._number, self._identity = number, found
            if self._on_open is not None:
                self._on_open(number)
        return self._number

    def append(self, data: bytes) -> None:
        """Write it.

        Raises:
            OSError: That cannot be done, or not all of it.
        """
        if os.write(self.hold(), data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def is_held(path: Path, pid: int) -> bool:
    """Whether a process has a file open; only on Linux."""
    descriptors = f"/proc/{pid}/fd"
    return any(_leads_to(f"{descriptors}/{number}", path) for number in os.listdir(descriptors))


def mapped_file(path: Path, size: int) -> mmap.mmap:
    """A new file in memory, which is mapped as long as the process lives.

    A map has a descriptor of its own, which it never uses, and closes when it is freed: it must not be freed.
    """
    import ctypes

    with path.open("w+b") as file:
        file.truncate(size)
        memory = mmap.mmap(file.fileno(), 0)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    return memory


def _leads_to(link: str, path: Path) -> bool:
    try:
        return os.path.samefile(link, path)
    except OSError:  # it has just been closed
        return False


def _identity(number: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _under_high_number(number: int) -> int:
    if sys.platform == "win32":
        return number
    import fcntl

    for least in _HIGH:
        with contextlib.suppress(OSError):  # the limit is lower, or all of them are in use
            high = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, least)
            os.close(number)
            return high
    return number
