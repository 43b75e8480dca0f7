"""`replace`: a copy of a dataclass or of a Struct with other values of some fields."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct, structs

if TYPE_CHECKING:  # by which fields and their types are checked, for Structs too
    from dataclasses import replace as replace
else:
    Value = TypeVar("Value")

    def replace(value: Value, /, **changes: Any) -> Value:
        """The copy.

        Raises:
            TypeError: There is no such field.
        """
        return (structs if isinstance(value, Struct) else dataclasses).replace(value, **changes)
