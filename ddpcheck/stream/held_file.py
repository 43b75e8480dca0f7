"""The files that a rank writes, in a process that belongs to a script: one that may close what it does not know.

Some are in memory, for what must survive a rank that dies: numbers that change in each step, and its last collectives.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from ddpcheck.findings.evidence.endings import PeerWait
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.files import read_file
from ddpcheck.stream.entries import GroupUsed

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

    A map has a descriptor of its own, which it never uses, and closes when it is freed: it must not be freed. Without
    blocks of its own, who writes into it is killed (SIGBUS) if the disk is full.

    Raises:
        OSError: There is no room for it.
    """
    import ctypes

    with path.open("w+b") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:  # macOS
            file.write(bytes(size))
            file.flush()
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


_PAIR = struct.Struct("<qq")
_PLACES = 256


class Counters:
    """Pairs of numbers by place (a wrapper, a loader), which this process writes."""

    def __init__(self, path: Path) -> None:
        self._memory = mapped_file(path, (_PLACES + 1) * _PAIR.size)

    def put(self, place: int, first: int, second: int) -> None:
        """Write a pair; one at a place that is too high is not kept."""
        if place < _PLACES:
            _PAIR.pack_into(self._memory, place * _PAIR.size, first, second)

    def put_error(self, number: int) -> None:
        """Write the number of the error that has ended the log."""
        _PAIR.pack_into(self._memory, _PLACES * _PAIR.size, number, 0)


def read_counters(path: Path) -> tuple[list[tuple[int, int]], int]:
    """The pairs by place, and the number of the error, 0 without one; zeros where the file is not there."""
    data = read_file(path, (_PLACES + 1) * _PAIR.size) if path.exists() else b""
    *pairs, (error, _) = _PAIR.iter_unpack(data.ljust((_PLACES + 1) * _PAIR.size, b"\0"))
    return pairs, error


_KEPT = 2048
_WIDTH = 384  # bytes of a call
_HEAD = struct.Struct("<qq")  # how many there have been; how often the main thread has come into one, or out of it
HEAD_SIZE = _HEAD.size
"""Bytes at the beginning of the file, which change as long as the rank comes to collectives, or these end."""
_SEPARATOR = "\x1f"
_FIELDS = 4  # of a wait
_WAIT = _HEAD.size + _KEPT * _WIDTH  # where it is written for which rank this one waits


class CallRing:
    """The ring that this process writes."""

    def __init__(self, path: Path) -> None:
        self._memory = mapped_file(path, _WAIT + _WIDTH)
        self._count = self._turns = self._depth = 0

    def add(self, call: Call, callers: int) -> None:
        """Write a call that is about to be made; `callers`: the number of the lines that have led to it."""
        whence = str(callers), call.location, call.place, call.thread
        words = _SEPARATOR.join((call.operation, call.group, call.payload, *whence))
        start = _HEAD.size + self._count % _KEPT * _WIDTH
        self._memory[start : start + _WIDTH] = words.encode("utf-8", "replace")[:_WIDTH].ljust(_WIDTH, b"\0")
        self._count += 1
        _HEAD.pack_into(self._memory, 0, self._count, self._turns)

    def turn(self, *, begins: bool) -> None:
        """Write that the main thread comes into a collective, or a wait for one; or out of it."""
        self._depth += 1 if begins else -1
        self._turns += self._depth == begins  # not for one inside of another
        _HEAD.pack_into(self._memory, 0, self._count, self._turns)

    def wait(self, wait: PeerWait | None) -> None:
        """Write that the rank begins to wait for another one in a point-to-point call; or no more."""
        fields = () if wait is None else (wait.operation, str(wait.peer), str(wait.tag), wait.location)
        self._memory[_WAIT:] = _SEPARATOR.join(fields).encode("utf-8", "replace")[:_WIDTH].ljust(_WIDTH, b"\0")


def read_wait(path: Path) -> PeerWait | None:
    """What a rank waits for in a point-to-point call; `None` where it does not."""
    words = read_file(path)[_WAIT:].rstrip(b"\0").decode("utf-8", "replace").split(_SEPARATOR)
    return PeerWait(words[0], int(words[1]), int(words[2]), words[3]) if len(words) == _FIELDS else None


def is_inside(path: Path) -> bool:
    """Whether the main thread of a rank is in a collective, or waits for one."""
    head = read_file(path, _HEAD.size, head=True)
    return len(head) == _HEAD.size and bool(_HEAD.unpack(head)[1] % 2)


def read_calls(
    path: Path, groups: Mapping[str, GroupUsed], callers: Mapping[str, tuple[str, ...]]
) -> tuple[int, list[Call]]:
    """The number of the first call that is still there, and the calls from it on.

    `groups` are by name; `callers` are the lines that have led to calls, by their number.
    """
    data = read_file(path)
    count, _ = _HEAD.unpack_from(data)
    first = max(0, count - _KEPT)
    calls = []
    for number in range(first, count):
        start = _HEAD.size + number % _KEPT * _WIDTH
        words = data[start : start + _WIDTH].rstrip(b"\0").decode("utf-8", "replace").split(_SEPARATOR)
        operation, group, payload, lines, location, place, thread = (*words, *[""] * 7)[:7]
        whence = callers.get(lines, ())
        used = groups.get(group)
        members, of = ((), "") if used is None else (used.members, used.words)
        call = Call(operation, group, members, payload, place, location, callers=whence, group_words=of, thread=thread)
        calls.append(call)
    return first, calls
