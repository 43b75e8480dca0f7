"""Deprecated names of classes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any


def renamed(module: str, **names: str) -> Callable[[str], Any]:
    """Return a module `__getattr__` that warns and resolves old names (`names`: old to new)."""

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is deprecated: use {names[name]}", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return __getattr__
