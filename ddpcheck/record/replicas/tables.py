"""Tables that a script derives: dictionaries, and lists in a set's iteration order."""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from random import Random
from typing import Any

from ddpcheck.findings.evidence.script import OF_A_LIST, DerivedTable
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import file_of_class, is_user_file, last_assignment, relative_path
from ddpcheck.record.replicas.program_state import line_of_variable, program_variables
from ddpcheck.record.source.source_scope import names_searched_by_index, program_files

_FEWEST, _MOST = 2, 4096  # items of a dictionary
_FEWEST_TEXTS, _MOST_TEXTS = 3, 1024  # texts in a list
_INSERTIONS = 200  # shuffles; finds nearly all sets of up to 20 names in under a millisecond
_FEW = 20  # names up to which shuffles are tried
_SLOTS = 32  # maximum slots of a hash table, per name
_IN_ORDER = 0.75  # share of neighbors in slot order (collisions move some); by chance, it is half


def is_order_of_a_set(names: list[str]) -> bool:
    """Return True if iterating over `set(names)` could give the names in this order."""
    if len(names) > _FEW:
        return _have_ascending_slots(names)
    rng, inserted = Random(0), list(names)
    for _ in range(_INSERTIONS):
        if names in (list(set(inserted)), list(set(dict.fromkeys(inserted)))):  # a set made of a mapping is presized
            return True
        rng.shuffle(inserted)
    return False


def _have_ascending_slots(names: list[str]) -> bool:
    """Return True if hash slots of `names` mostly ascend, as in a set."""
    hashes, size = [hash(name) for name in names], 8
    while size < _SLOTS * len(names):
        rising = sum(current & (size - 1) <= following & (size - 1) for current, following in pairwise(hashes))
        if rising >= _IN_ORDER * (len(names) - 1):
            return True
        size *= 2
    return False


def tables_of(holder: Any, location: Location | None) -> list[DerivedTable]:
    """Return lookup tables in a dataset's attributes: dictionaries, and lists in a set's order."""
    name = type(holder).__name__
    attrs = getattr(holder, "__dict__", {})
    file = file_of_class(type(holder))
    until = Location(relative_path(file), sys.maxsize) if is_user_file(file) else None
    tables = [DerivedTable(f"{name}.{key}", table, location) for key, item in attrs.items() if (table := _table(item))]
    tables = [replace(t, location=(until and last_assignment(until, t.name)) or location) for t in tables]
    return tables + [t for key, item in attrs.items() for t in _indices_of_texts(f"{name}.{key}", item, until)]


def tables_of_program() -> list[DerivedTable]:
    """Return lookup tables in program variables: dictionaries, and lists in a set's order."""
    tables: list[DerivedTable] = []
    for path, value, location in program_variables(depth=1):
        if table := _table(value):
            tables.append(DerivedTable(path, table, location and line_of_variable(path, location)))
        tables += _indices_of_texts(path, value, location)
    return tables


def _indices_of_texts(path: str, value: Any, where: Location | None) -> list[DerivedTable]:
    """Return {text: index} of a list in set order whose `index` method is called.

    A set of texts iterates in another order in each process. Lists in any other order, such as the files of a rank, may
    differ between ranks on purpose.
    """
    kind = type(value)
    if where is None or kind not in (list, tuple) or not _FEWEST_TEXTS <= len(value) <= _MOST_TEXTS:
        return []
    texts = list(value)
    if not all(type(text) is str for text in texts) or len(set(texts)) < len(texts) or not is_order_of_a_set(texts):
        return []
    if not any(path.rpartition(".")[2] in names_searched_by_index(file) for file in program_files()):
        return []
    places = {repr(text): str(index) for index, text in enumerate(texts)}
    return [DerivedTable(f"{path}{OF_A_LIST}", places, line_of_variable(path, where))]


def _table(value: Any) -> dict[str, str] | None:
    """Return `repr` strings of a dictionary's items, or `None` if `value` is not plain."""
    if type(value) is not dict or not _FEWEST <= len(value) <= _MOST or value is os.environ:
        return None
    table = value.copy()  # copy first: another thread may change the dictionary
    if not all(issubclass(type(item), str | int) for pair in table.items() for item in pair):  # safe for proxy objects
        return None
    return {repr(key): repr(item) for key, item in table.items()}
