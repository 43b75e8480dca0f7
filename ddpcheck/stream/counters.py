"""Numbers that change in each step, in a file in memory: what they were last survives a rank that dies."""

from __future__ import annotations

import struct
from pathlib import Path

from ddpcheck.stream.held_file import mapped_file

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
    data = path.read_bytes() if path.exists() else b""
    *pairs, (error, _) = _PAIR.iter_unpack(data.ljust((_PLACES + 1) * _PAIR.size, b"\0"))
    return pairs, error
