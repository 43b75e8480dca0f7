"""Convert JSON to dataclasses, with a type check of every field."""

from __future__ import annotations

import json
import math
from dataclasses import field
from typing import Any, TypeVar

import msgspec

Value = TypeVar("Value")


def added(default: Any, *, compare: bool = True) -> Any:
    """Return a dataclass field that is missing in JSON of older versions."""
    return field(default=default, compare=compare, metadata={"added": True})


def parse(text: str) -> Any:
    """Parse JSON whose numbers are finite.

    Raises:
        ValueError: `text` is not JSON, has a number that is not finite, or is nested too deeply.
    """

    def number(spelled: str) -> float:
        if math.isfinite(value := float(spelled)):
            return int(spelled) if spelled.lstrip("-").isdecimal() else value
        shortened = spelled if len(spelled) <= 40 else f"{spelled[:37]}..."
        raise ValueError(f"{shortened} is not a number in JSON, or too large")

    try:
        return json.loads(text, parse_constant=number, parse_float=number, parse_int=number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read(kind: type[Value], data: Any) -> Value:
    """Convert `data` to `kind`; unknown keys (of newer versions) are ignored.

    Args:
        kind: Dataclass of strings, numbers, enums, dataclasses, and tuples and mappings of these types.
        data: Output of `parse`.

    Raises:
        ValueError: A field is missing or has the wrong type; the message has the path of the field.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
