"""`replace`: copy a dataclass or Struct with changed fields."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct, structs

if TYPE_CHECKING:  # so that type checkers verify fields of Structs too
    from dataclasses import replace as replace
else:
    Value = TypeVar("Value")

    def replace(value: Value, /, **changes: Any) -> Value:
        """Return a copy with changed fields; raise `TypeError` for unknown fields."""
        return (structs if isinstance(value, Struct) else dataclasses).replace(value, **changes)
