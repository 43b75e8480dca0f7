"""From JSON to the dataclass that it was written from, with every value checked against the type of its field."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

Value = TypeVar("Value")


class IncompleteError(ValueError):
    """Something is missing in what was read."""


def added(default: Any, *, compare: bool = True) -> Any:
    """A field that what older versions wrote does not have."""
    return field(default=default, compare=compare, metadata={"added": True})


def parse(text: str) -> Any:
    """The JSON in `text`; numbers are finite.

    Raises:
        ValueError: It is none, or nested too deeply.
    """

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no number in JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read(kind: type[Value], data: Any, where: str = "") -> Value:
    """Make a `kind` of `data`; keys that it does not know are left out, which newer versions may have added.

    Args:
        kind: A dataclass, whose fields are strings, numbers, enums, dataclasses, or tuples and mappings of them.
        data: From `parse`.
        where: The path of `data` in what was read.

    Raises:
        IncompleteError: A field is missing.
        ValueError: A value is of another type; the message names its path.
    """
    made: Value = _read(kind, data, where)
    return made


def _read(kind: Any, data: Any, where: str) -> Any:
    """See `read`, for a field's type of any form."""
    inside = get_args(kind)
    origin = get_origin(kind)
    if origin is UnionType:
        return None if data is None else _read(next(one for one in inside if one is not type(None)), data, where)
    if origin is Literal or (isinstance(kind, type) and issubclass(kind, Enum)):
        choices = inside if origin is Literal else tuple(member.value for member in kind)
        if not isinstance(data, str) or data not in choices:
            raise _wrong(where, f"one of {', '.join(choices)}", data)
        return data if origin is Literal else kind(data)
    if origin is tuple:
        items = _checked(where, "a list", isinstance(data, list), data)
        return tuple(_read(inside[0], item, f"{where}[{index}]") for index, item in enumerate(items))
    if origin is Mapping:
        items = _checked(where, "an object", isinstance(data, dict), data)
        return {key: _read(inside[1], item, _path(where, key)) for key, item in items.items()}
    if is_dataclass(kind):
        items = _checked(where, "an object", isinstance(data, dict), data)
        build: Any = kind
        for name, (_, is_added) in _fields(build).items():
            if name not in items and not is_added:
                raise IncompleteError(f"{_path(where, name)!r} is missing")
        hints = {name: hint for name, (hint, _) in _fields(build).items() if name in items}
        return build(**{name: _read(hint, items[name], _path(where, name)) for name, hint in hints.items()})
    if kind is Any:
        return _checked(where, "finite", _is_finite(data), data)
    if kind is float:
        return _checked(where, "a number", _is_number(data) and _is_finite(data), data)
    if kind is int:
        return _checked(where, "a whole number", _is_number(data) and isinstance(data, int), data)
    names = {str: "a string", bool: "true or false"}
    return _checked(where, names[kind], isinstance(data, kind), data)


@functools.cache
def _fields(kind: Any) -> Mapping[str, tuple[Any, bool]]:
    """By name, the type of each field of a dataclass, and whether older versions did not have it."""
    hints = get_type_hints(kind)
    return {one.name: (hints[one.name], one.metadata.get("added", False)) for one in fields(kind) if one.init}


def _is_number(data: Any) -> bool:
    return isinstance(data, int | float) and not isinstance(data, bool)


def _is_finite(data: Any) -> bool:
    """Whether what may be a number is one that can be printed."""
    try:
        return not _is_number(data) or math.isfinite(data)
    except OverflowError:
        return False


def _checked(where: str, what: str, holds: bool, data: Any) -> Any:
    if not holds:
        raise _wrong(where, what, data)
    return data


def _wrong(where: str, what: str, data: Any) -> ValueError:
    shown = json.dumps(data) if _is_finite(data) else "a number that is too large"
    shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
    return ValueError(f"{where or 'it'} must be {what}, not {shown}")


def _path(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
