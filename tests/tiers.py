"""The tiers of the tests: `make test` runs what protects a change, `make test-all` all that it leaves out.

A test without a mark is in `make test`. What is marked is left to `make test-all`:

- `slow`: more of what `make test` has a share of, or the rest of a framework;
- `launchers`: starts torchrun, Open MPI or SLURM.

`make test-exhaustive` runs the tests that are marked `exhaustive` as well, which are further cases of what another test
has or measure for a minute. Of what is many cases of one thing, `make test-all` runs one in so many (`one_of`), and
`make test-exhaustive`, which sets EVERY_CASE, all.

`smoke` takes single tests of a file that is marked as a whole into `make test`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Iterable
from importlib.util import find_spec
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skip where a module is not installed; it is not imported, for which every worker of a test run would wait."""
    missing = [name for name in modules if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)}: not installed")


def share(values: Iterable[Any], chosen: Collection[Any], mark: pytest.MarkDecorator = pytest.mark.slow) -> list[Any]:
    """Arguments for `parametrize`, of which all but the chosen ones have a mark."""
    return [value if value in chosen else pytest.param(value, marks=mark) for value in values]


def one_of(count: int, values: Iterable[T]) -> list[T]:
    """One of so many values, for what takes long; all of them where the variable EVERY_CASE is set."""
    return list(values)[:: 1 if os.environ.get("EVERY_CASE") else count]


def first_of_each(values: Iterable[T], kinds: Callable[[T], Iterable[Hashable]]) -> list[T]:
    """Those of `values` that are the first of a kind; one may be of several kinds."""
    seen: set[Hashable] = set()
    chosen = []
    for value in values:
        if new := set(kinds(value)) - seen:
            seen |= new
            chosen.append(value)
    return chosen
