"""Log files of a rank whose script may close unknown file descriptors.

Data that must survive the rank is memory-mapped: counters that change in each step, and the last collectives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

from ddpcheck.findings.evidence.endings import PeerWait
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.files import read_file
from ddpcheck.stream.entries import GroupUsed

_HIGH_DESCRIPTORS = (4032, 960, 192)  # minimum descriptor numbers, tried in order because of the process limit
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC


class LogFile:
    """Append-only file, with a descriptor number so high that the script never gets it."""

    def __init__(self, path: Path, on_open: Callable[[int], object] | None = None) -> None:
        """Create the file; `on_open` gets the descriptor after each opening."""
        self._path = str(path)
        self._on_open = on_open
        self._number = -1
        self._file_identity: tuple[int, int] | None = None
        path.touch()
        self.hold()

    def hold(self) -> int:
        """Return an open descriptor; reopen the file if the script has closed the descriptor."""
        if self._file_identity is None or _file_identity(self._number) != self._file_identity:
            number = _move_descriptor_up(os.open(self._path, _FLAGS))
            identity = _file_identity(number)
            if self._file_identity not in (None, identity):
                os.close(number)
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._path)
            self._number, self._file_identity = number, identity
            if self._on_open is not None:
                self._on_open(number)
        return self._number

    def append(self, data: bytes) -> None:
        """Append data; raise `OSError` if not all data can be written."""
        if os.write(self.hold(), data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def is_file_open(path: Path, pid: int) -> bool:
    """Return True if a process has a file open (Linux only)."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed in the meantime
            if descriptor.samefile(path):
                return True
    return False


def mapped_file(path: Path, size: int) -> mmap.mmap:
    """Create a memory-mapped file that stays mapped until the process ends.

    The map is never freed: it would close its descriptor, whose number the program may have reused. The blocks are
    allocated first (`OSError` without space): writing to a sparse map kills the process (SIGBUS) if the disk is full.
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


def _file_identity(number: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _move_descriptor_up(number: int) -> int:
    for minimum in _HIGH_DESCRIPTORS:
        with contextlib.suppress(OSError):  # the limit is lower, or all higher descriptors are in use
            new_number = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, minimum)
            os.close(number)
            return new_number
    return number


_PAIR = struct.Struct("<qq")
_PAIRS = 256


class Counters:
    """Memory-mapped file with two numbers for each wrapper or loader, such as batch counts."""

    def __init__(self, path: Path) -> None:
        self._memory = mapped_file(path, (_PAIRS + 1) * _PAIR.size)

    def put(self, index: int, first: int, second: int) -> None:
        """Write the two numbers of wrapper or loader `index`, unless `index` is too high."""
        if index < _PAIRS:
            _PAIR.pack_into(self._memory, index * _PAIR.size, first, second)

    def put_error(self, number: int) -> None:
        """Write the `errno` of the error that ended the log; -1 if unknown."""
        _PAIR.pack_into(self._memory, _PAIRS * _PAIR.size, number, 0)


def read_counters(path: Path) -> tuple[list[tuple[int, int]], int]:
    """Return the number pairs by index, and the `errno` of `put_error` (0 if none)."""
    data = read_file(path, (_PAIRS + 1) * _PAIR.size) if path.exists() else b""
    *pairs, (error, _) = _PAIR.iter_unpack(data.ljust((_PAIRS + 1) * _PAIR.size, b"\0"))
    return pairs, error


_KEPT = 2048
_WIDTH = 384  # bytes per call
_HEAD = struct.Struct("<qq")  # number of calls; number of times that the main thread entered or left a collective
HEAD_SIZE = _HEAD.size
"""Header size in bytes; the header changes when a collective starts or ends."""
_SEPARATOR = "\x1f"
_FIELDS = 4  # number of fields of a wait
_WAIT = _HEAD.size + _KEPT * _WIDTH  # offset of the current point-to-point wait


class CallRing:
    """Ring buffer of the last collectives of this process."""

    def __init__(self, path: Path) -> None:
        self._memory = mapped_file(path, _WAIT + _WIDTH)
        self._count = self._turns = self._depth = 0

    def add(self, call: Call, callers: int) -> None:
        """Write a collective before it executes; `callers`: number of its call stack."""
        source = str(callers), call.location, call.place, call.thread
        words = _SEPARATOR.join((call.operation, call.group, call.payload, *source))
        start = _HEAD.size + self._count % _KEPT * _WIDTH
        self._memory[start : start + _WIDTH] = words.encode("utf-8", "replace")[:_WIDTH].ljust(_WIDTH, b"\0")
        self._count += 1
        _HEAD.pack_into(self._memory, 0, self._count, self._turns)

    def count_turn(self, *, begins: bool) -> None:
        """Count a turn: the main thread enters (`begins`) or leaves a collective or wait."""
        self._depth += 1 if begins else -1
        self._turns += self._depth == begins  # ignore nested collectives
        _HEAD.pack_into(self._memory, 0, self._count, self._turns)

    def wait(self, wait: PeerWait | None) -> None:
        """Write that a point-to-point wait begins, or (None) that it has ended."""
        fields = () if wait is None else (wait.operation, str(wait.peer), str(wait.tag), wait.location)
        self._memory[_WAIT:] = _SEPARATOR.join(fields).encode("utf-8", "replace")[:_WIDTH].ljust(_WIDTH, b"\0")


def read_wait(path: Path) -> PeerWait | None:
    """Return the current point-to-point wait of a rank, or None."""
    words = read_file(path)[_WAIT:].rstrip(b"\0").decode("utf-8", "replace").split(_SEPARATOR)
    return PeerWait(words[0], int(words[1]), int(words[2]), words[3]) if len(words) == _FIELDS else None


def is_inside(path: Path) -> bool:
    """Return True if a rank's main thread is in a collective or wait."""
    head = read_file(path, _HEAD.size, head=True)
    return len(head) == _HEAD.size and bool(_HEAD.unpack(head)[1] % 2)


def read_calls(
    path: Path, groups: Mapping[str, GroupUsed], callers: Mapping[str, tuple[str, ...]]
) -> tuple[int, list[Call]]:
    """Return the number of the first call in the ring, and all calls.

    `groups` are by name, `callers` are call stacks by number.
    """
    data = read_file(path)
    count, _ = _HEAD.unpack_from(data)
    first = max(0, count - _KEPT)
    calls = []
    for number in range(first, count):
        start = _HEAD.size + number % _KEPT * _WIDTH
        words = data[start : start + _WIDTH].rstrip(b"\0").decode("utf-8", "replace").split(_SEPARATOR)
        operation, group, payload, stack_id, line, phase, thread = (*words, *[""] * 7)[:7]
        stack = callers.get(stack_id, ())
        entry = groups.get(group)
        members, label = ((), "") if entry is None else (entry.members, entry.words)
        call = Call(operation, group, members, payload, phase, line, callers=stack, group_words=label, thread=thread)
        calls.append(call)
    return first, calls
