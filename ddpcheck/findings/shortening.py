"""Texts of a length that a person reads: what is too long is cut in its middle, and says by how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, cast

from ddpcheck.findings.replace import replace

Value = TypeVar("Value")

LONGEST_TRACEBACK = 10_000  # characters
_LONGEST = 2_000
_LONGEST_OF = {"subjects": 500, "parameter": 500, "detail": 20_000}  # by the name of the field


def shortened(text: str, most: int) -> str:
    """`text`; where it has more than `most` characters, its beginning and end, and how much is left out between."""
    left_out = len(text) - most
    if left_out <= 0:
        return text
    beginning = most * 2 // 3
    return f"{text[:beginning]} ... {left_out} characters left out ... {text[beginning - most :]}"


def limited(value: Value) -> Value:
    """A report, or anything that such is made of, with every text in it shortened."""
    return cast(Value, _limited(value, _LONGEST))


def _limited(value: Any, most: int) -> Any:
    if isinstance(value, str):
        return value if isinstance(value, Enum) else shortened(value, most)
    if isinstance(value, tuple | list):
        return type(value)(_limited(item, most) for item in value)
    if isinstance(value, Mapping):
        return {_limited(key, most): _limited(item, most) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        now = {one.name: getattr(value, one.name) for one in fields(value)}
        short = {name: _limited(item, _LONGEST_OF.get(name, most)) for name, item in now.items()}
        changed = {name: item for name, item in short.items() if item != now[name]}
        return replace(value, **changed) if changed else value
    return value
