"""Coverage inside the ranks: measured there as it is measured here, and added to what is measured here.

Nothing is written to disk and nothing has to be combined, so this works under pytest-cov, with and without xdist, and
under `coverage run`. Public API of coverage.py only: `Coverage.current`, `get_option`, `CoverageData.dumps`, `update`
(https://coverage.readthedocs.io/en/latest/api_coverage.html).

This module is light: it never imports torch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_OPTIONS = (
    "run:branch",
    "run:concurrency",
    "run:core",
    "run:cover_pylib",
    "run:dynamic_context",
    "run:include",
    "run:omit",
    "run:plugins",
    "run:relative_files",
    "run:source",
    "run:source_pkgs",
    "run:source_dirs",
    "run:timid",
)
_NEEDLESS = ("no-data-collected", "module-not-imported", "module-not-measured", "already-imported")


@dataclass(frozen=True, slots=True)
class CoverageData:
    """The measurement of one rank, as coverage.py serialises it."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Measuring:
    """The settings under which coverage is measured in this process.

    Attributes:
        options: Of coverage.py, by name.
        file: Its configuration file, which holds the options of its plugins.
        context: That what is measured is recorded under, empty for none.
    """

    options: Mapping[str, Any]
    file: str | None
    context: str

    @classmethod
    def now(cls, context: str) -> Measuring | None:
        """The settings of this process; `None` where coverage is not measured."""
        current = _current()
        if current is None:
            return None
        options = {}
        for name in _OPTIONS:
            with contextlib.suppress(Exception):  # another version of coverage.py has no such option
                options[name] = current.get_option(name)
        return cls(options, getattr(current.config, "config_file", None), context)


@contextlib.contextmanager
def measured(how: Measuring | None) -> Iterator[list[CoverageData]]:
    """On a rank: measure while the block runs; the list holds the result afterwards, nothing without a `how`."""
    found: list[CoverageData] = []
    if how is None:
        yield found
        return
    import coverage

    ours = coverage.Coverage(data_file=None, config_file=how.file or False, messages=False)
    for name, value in how.options.items():
        with contextlib.suppress(Exception):
            ours.set_option(name, value)
    ours.set_option("run:disable_warnings", list(_NEEDLESS))
    ours.start()
    try:
        if how.context:
            ours.switch_context(how.context)
        yield found
    finally:
        ours.stop()
        found.append(CoverageData(ours.get_data().dumps()))


def add(measured: CoverageData) -> None:
    """Add to what is measured in this process."""
    current = _current()
    if current is None:
        return
    import coverage

    theirs = coverage.CoverageData(no_disk=True)
    theirs.loads(measured.data)
    current.get_data().update(theirs)


def _current() -> Any:
    coverage = sys.modules.get("coverage")
    return coverage.Coverage.current() if coverage is not None else None
