"""Convert JSON to dataclasses, with a type check of every field."""

from __future__ import annotations

import json
import math
from dataclasses import field
from typing import Any, TypeVar

import msgspec

Value = TypeVar("Value")


def added(default: Any, *, compare: bool = True) -> Any:
    """Declare a dataclass field that may be missing in JSON of older ddpcheck versions."""
    return field(default=default, compare=compare, metadata={"added": True})


def parse(text: str) -> Any:
    """Parse JSON; raise `ValueError` if invalid, not finite, or nested too deeply."""

    def number(spelled: str) -> float:
        if math.isfinite(value := float(spelled)):
            return int(spelled) if spelled.lstrip("-").isdecimal() else value
        shortened = spelled if len(spelled) <= 40 else f"{spelled[:37]}..."
        raise ValueError(f"{shortened} is not a number in JSON, or too large")

    try:
        return json.loads(text, parse_constant=number, parse_float=number, parse_int=number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def build(kind: type[Value], data: Any) -> Value:
    """Convert the output of `parse` to a dataclass; ignore unknown keys (of newer versions).

    Raises ValueError with the path of a field that is missing or has the wrong type.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
