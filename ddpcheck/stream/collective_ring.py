"""The last collectives of a rank, in a file in memory: each is there before it is made, and survives a rank that dies.

This module is light: it never imports torch.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

from ddpcheck.findings.evidence.steps import Call
from ddpcheck.stream.held_file import mapped_file

_KEPT = 2048
_WIDTH = 384  # bytes of a call
_HEAD = struct.Struct("<q")  # how many there have been
_SEPARATOR = "\x1f"


class CallRing:
    """The ring that this process writes."""

    def __init__(self, path: Path) -> None:
        self._memory = mapped_file(path, _HEAD.size + _KEPT * _WIDTH)
        self._count = 0

    def add(self, call: Call, callers: int) -> None:
        """Write a call that is about to be made; `callers`: the number of the lines that have led to it."""
        words = _SEPARATOR.join((call.operation, call.group, call.payload, str(callers), call.location, call.place))
        start = _HEAD.size + self._count % _KEPT * _WIDTH
        self._memory[start : start + _WIDTH] = words.encode("utf-8", "replace")[:_WIDTH].ljust(_WIDTH, b"\0")
        self._count += 1
        _HEAD.pack_into(self._memory, 0, self._count)


def calls_so_far(path: Path) -> int:
    """How many collectives a rank has come to."""
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
    return int(_HEAD.unpack(head)[0]) if len(head) == _HEAD.size else 0


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
    (count,) = _HEAD.unpack_from(data)
    first = max(0, count - _KEPT)
    calls = []
    for number in range(first, count):
        start = _HEAD.size + number % _KEPT * _WIDTH
        words = data[start : start + _WIDTH].rstrip(b"\0").decode("utf-8", "replace").split(_SEPARATOR)
        operation, group, payload, lines, location, place = (*words, "", "", "", "", "", "")[:6]
        whence = callers.get(lines, ())
        calls.append(Call(operation, group, members.get(group, ()), payload, place, location, callers=whence))
    return first, calls
