"""Bytes of any size on a store of torch, in pieces: a TCPStore closes the connection on a value of more than 8 MiB."""

from __future__ import annotations

from collections.abc import Callable

_PIECE = 4 << 20  # bytes
_COUNT = 4  # bytes at the beginning of the first piece, which say how many there are


def put_value(put: Callable[[str, bytes], object], name: str, data: bytes) -> None:
    """Write a value; `name` itself last, so that a rank that has waited for it finds all of it."""
    pieces = [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)] or [b""]
    for index, piece in enumerate(pieces[1:], 1):
        put(f"{name}#{index}", piece)
    put(name, len(pieces).to_bytes(_COUNT, "big") + pieces[0])


def get_value(get: Callable[[str], bytes], name: str) -> bytes:
    """Read a value that exists."""
    first = bytes(get(name))
    more = range(1, int.from_bytes(first[:_COUNT], "big"))
    return b"".join([first[_COUNT:], *(bytes(get(f"{name}#{index}")) for index in more)])


def remove_value(delete: Callable[[str], bool], name: str) -> None:
    """Delete a value; `delete` returns whether a key was there."""
    piece = 0
    while delete(f"{name}#{piece}" if piece else name):
        piece += 1
