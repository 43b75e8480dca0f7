"""From JSON to the dataclass that it was written from, with every value checked against the type of its field."""

from __future__ import annotations

import json
import math
from dataclasses import field
from typing import Any, TypeVar

import msgspec

Value = TypeVar("Value")


def added(default: Any, *, compare: bool = True) -> Any:
    """A field that what older versions wrote does not have."""
    return field(default=default, compare=compare, metadata={"added": True})


def parse(text: str) -> Any:
    """The JSON in `text`, with numbers that a float can be.

    Raises:
        ValueError: It is none, or nested too deeply.
    """

    def number(spelled: str) -> float:
        if math.isfinite(value := float(spelled)):
            return int(spelled) if spelled.lstrip("-").isdecimal() else value
        shown = spelled if len(spelled) <= 40 else f"{spelled[:37]}..."
        raise ValueError(f"{shown} is not a number in JSON, or too large")

    try:
        return json.loads(text, parse_constant=number, parse_float=number, parse_int=number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read(kind: type[Value], data: Any) -> Value:
    """Make a `kind` of `data`; keys that it does not know are left out, which newer versions may have added.

    Args:
        kind: A dataclass, whose fields are strings, numbers, enums, dataclasses, or tuples and mappings of them.
        data: From `parse`.

    Raises:
        ValueError: A field is missing, or a value is of another type; the message has its path.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
