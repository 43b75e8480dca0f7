"""Encoding of log entries: length, then kind and fields in msgpack.

A truncated last entry is dropped, since a process may die during a write. An entry that this version cannot decode
(unknown kind, missing fields) is counted and skipped.
"""

from __future__ import annotations

import functools
import struct
from base64 import b64decode
from collections.abc import Callable
from typing import Any

import msgspec

from ddpcheck.findings.evidence import Entry
from ddpcheck.stream.entries import KINDS, Sketch

_LENGTH = struct.Struct("<I")
_SMALLEST, _LARGEST = -(1 << 63), (1 << 64) - 1  # int range of msgpack; a fingerprint may be as large as the maximum
_CONVERTERS: dict[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}


def _to_plain(value: Any) -> Any:
    """Convert a `Sketch` to bytes, and other scalars to plain str, int or float."""
    if isinstance(value, Sketch):
        return value.tobytes()
    convert = next((function for kind, function in _CONVERTERS.items() if isinstance(value, kind)), None)
    return value.item() if convert is None else convert(value)


_kind_and_fields = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw]).decode
_encode = msgspec.msgpack.Encoder(enc_hook=_to_plain).encode


def encoded(entry: Entry) -> bytes:
    """Encode an entry for a log."""
    try:
        data = _encode((type(entry).__name__, entry))
    except (UnicodeEncodeError, OverflowError):  # file name with invalid UTF-8, or integer over 64 bits
        data = _encode(fields_of_entry(entry))
    return _LENGTH.pack(len(data)) + data


def decoded(data: bytes) -> tuple[list[Entry], int]:
    """Decode the entries of a log; also return the number of undecodable entries."""
    entries: list[Entry] = []
    start = unknown = 0
    while len(data) >= start + _LENGTH.size:
        (length,) = _LENGTH.unpack_from(data, start)
        start, end = start + _LENGTH.size, start + _LENGTH.size + length
        if end > len(data):
            break
        try:
            kind, fields = _kind_and_fields(data[start:end])
            entries.append(_decoder(kind).decode(fields))
        except (msgspec.MsgspecError, KeyError):
            unknown += 1
        start = end
    return entries, unknown


@functools.cache
def _decoder(kind: str) -> msgspec.msgpack.Decoder[Entry]:
    return msgspec.msgpack.Decoder(KINDS[kind], dec_hook=lambda _, data: Sketch("f", data))


def fields_of_entry(entry: Entry) -> tuple[str, Any]:
    """Return the kind of an entry, and its fields as plain data."""
    fields = msgspec.to_builtins(entry, enc_hook=_to_plain, builtin_types=(bytes,))
    return type(entry).__name__, _encodable(fields)


def entry_from_fields(kind: str, fields: Any) -> Entry | None:
    """Build an entry from fields, with bytes in base64 (RFC 4648); None if invalid."""
    try:
        return msgspec.convert(
            fields, KINDS[kind], dec_hook=lambda _, text: Sketch("f", b64decode(text)), str_keys=True
        )
    except (msgspec.ValidationError, KeyError, ValueError):
        return None


def _encodable(value: Any) -> Any:
    """Escape invalid Unicode as Python does; clamp integers to msgpack's range."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int):
        return max(_SMALLEST, min(value, _LARGEST))
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list | tuple) else value
