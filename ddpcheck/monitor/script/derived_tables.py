"""The dictionaries that a script has derived: label maps, vocabularies, and what else its processes should agree on."""

from __future__ import annotations

import os
import sys
from typing import Any

from torch import nn

from ddpcheck.findings.evidence.script import DerivedTable
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import is_user_file, relative_path

_FEWEST, _MOST = 2, 4096  # items of a dictionary


def tables_of(holder: Any, location: Location | None) -> list[DerivedTable]:
    """Those that an object holds: a dataset, say."""
    name = type(holder).__name__
    held = getattr(holder, "__dict__", {})
    return [DerivedTable(f"{name}.{key}", table, location) for key, item in held.items() if (table := _table(item))]


def tables_of_program() -> list[DerivedTable]:
    """The dictionaries of plain values in the user's functions that run now, and in their modules."""
    found: dict[str, DerivedTable] = {}
    frame: Any = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            where = Location(relative_path(frame.f_code.co_filename), frame.f_lineno)
            for variables in (frame.f_locals, frame.f_globals):
                for name, value in list(variables.items()):
                    for path, table in _tables_in(name, value):
                        found.setdefault(path, DerivedTable(path, table, where))
        frame = frame.f_back
    return list(found.values())


def _tables_in(name: str, value: Any) -> list[tuple[str, dict[str, str]]]:
    if isinstance(value, dict):
        table = _table(value)
        return [(name, table)] if table else []
    kind = type(value)
    module = sys.modules.get(kind.__module__)
    if is_user_file(getattr(module, "__file__", None) or "") and not isinstance(value, nn.Module | type):
        inner = getattr(value, "__dict__", {})
        return [(f"{name}.{key}", table) for key, item in list(inner.items()) if (table := _table(item))]
    return []


def _table(value: Any) -> dict[str, str] | None:
    """A dictionary of plain keys to plain values, spelled; `None` for anything else."""
    if type(value) is not dict or not _FEWEST <= len(value) <= _MOST or value is os.environ:
        return None
    if not all(isinstance(key, str | int) and isinstance(item, str | int) for key, item in value.items()):
        return None
    return {repr(key): repr(item) for key, item in value.items()}
