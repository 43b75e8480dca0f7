"""The last collectives of a rank, in a file in memory: each is there before it is made, and after a rank that dies."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

from ddpcheck.findings.evidence.endings import PeerWait
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.stream.held_file import mapped_file

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
        words = _SEPARATOR.join((call.operation, call.group, call.payload, str(callers), call.location, call.place))
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
    words = path.read_bytes()[_WAIT:].rstrip(b"\0").decode("utf-8", "replace").split(_SEPARATOR)
    return PeerWait(words[0], int(words[1]), int(words[2]), words[3]) if len(words) == _FIELDS else None


def is_inside(path: Path) -> bool:
    """Whether the main thread of a rank is in a collective, or waits for one."""
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
    return len(head) == _HEAD.size and bool(_HEAD.unpack(head)[1] % 2)


def read_calls(
    path: Path, members: Mapping[str, tuple[int, ...]], callers: Mapping[str, tuple[str, ...]]
) -> tuple[int, list[Call]]:
    """The number of the first call that is still there, and the calls from it on.

    Args:
        path: Of the ring.
        members: Of each group.
        callers: The lines that have led to calls, by their number.
    """
    data = path.read_bytes()
    count, _ = _HEAD.unpack_from(data)
    first = max(0, count - _KEPT)
    calls = []
    for number in range(first, count):
        start = _HEAD.size + number % _KEPT * _WIDTH
        words = data[start : start + _WIDTH].rstrip(b"\0").decode("utf-8", "replace").split(_SEPARATOR)
        operation, group, payload, lines, location, place = (*words, "", "", "", "", "", "")[:6]
        whence = callers.get(lines, ())
        calls.append(Call(operation, group, members.get(group, ()), payload, place, location, callers=whence))
    return first, calls
