"""The conditions under which a test's code runs on a rank: as far as possible those of the process of pytest.

Warning filters, logging, random numbers that a fixture has seeded, coverage, and how a failure is to be shown. All of
it is read in the parent (`TestConditions.of`) and applied on the rank, from where `RankArtifacts` comes back.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from ddpcheck.worlds.generators import changed_since, generators

_COMPARISONS = ("truncation_limit_lines", "truncation_limit_chars", "assertion_text_diff_style")


@dataclass(frozen=True, slots=True)
class Style:
    """The options of pytest for tracebacks."""

    traceback: str  # --tb
    show_locals: bool
    full: bool
    verbosity: int
    assertions: int  # verbosity of assertions
    comparisons: Mapping[str, Any]  # what the ini file says about explaining one
    directory: str  # that paths are shown relative to


def drawn_generators() -> dict[str, Any]:
    """The states of the generators after one number of each: seeding, even with the last seed, changes them."""
    random.random()
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.random_sample()
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_rng_state"):
        torch.rand(1)
    return generators(thorough=True)


@dataclass(frozen=True, slots=True)
class TestConditions:
    """The conditions for a test's code on a rank."""

    filters: tuple[Any, ...]  # of `warnings`
    log_level: int
    log_format: tuple[str, str]  # of a line, and of its date
    seeds: Mapping[str, Any]  # states of generators that have been seeded since the test began
    coverage: CoverageOptions | None
    style: Style
    debugger: bool  # somebody sits at a terminal: `breakpoint()` works
    post_mortem: bool  # a failure opens the debugger

    @classmethod
    def of(cls, item: pytest.Item, *, since: Mapping[str, Any], debugger: bool) -> TestConditions:
        """Read them off this process."""
        config = item.config
        by_test = config.getoption("cov_context", None) == "test"
        return cls(
            filters=tuple(warnings.filters),
            log_level=logging.getLogger().level,
            log_format=(str(_ini(config, "log_format") or ""), str(_ini(config, "log_date_format") or "")),
            seeds=changed_since(since),
            coverage=CoverageOptions.now(f"{item.nodeid}|run" if by_test else ""),
            style=Style(
                config.getoption("tbstyle", "auto"),
                bool(config.getoption("showlocals", False)),
                bool(config.getoption("fulltrace", False)),
                config.option.verbose,
                config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS),
                {name: value for name in _COMPARISONS if (value := _ini(config, name)) is not None},
                str(config.invocation_params.dir),
            ),
            debugger=debugger,
            post_mortem=debugger and bool(config.getoption("usepdb", False)),
        )


def _ini(config: pytest.Config, name: str) -> Any:
    try:
        return config.getoption(name, None) or config.getini(name)
    except (KeyError, ValueError):  # the logging plugin is switched off, or an older pytest has no such option
        return None


@dataclass(slots=True)
class RankArtifacts:
    """The results of a test on a rank beside its outcome."""

    warnings: list[tuple[Warning, type[Warning], str, int]] = field(default_factory=list)  # with file and line
    log: str = ""
    coverage: bytes = b""  # as coverage.py serialises it; empty where nothing was measured
    properties: list[tuple[str, object]] = field(default_factory=list)  # what `record_property` was told
    failure: Any = None  # as pytest shows it
    quitting: bool = False  # whoever debugged the failure wants the session to end


# --- Coverage --------------------------------------------------------------------------------------------------------

# Nothing is written to disk and nothing has to be combined, so this works under pytest-cov, with and without xdist, and
# under `coverage run`. Public API of coverage.py only: `Coverage.current`, `get_option`, `CoverageData.dumps`, `update`
# (https://coverage.readthedocs.io/en/latest/api_coverage.html).
_COVERAGE_OPTIONS = (  # of its section `run`
    *("branch", "concurrency", "core", "cover_pylib", "dynamic_context", "include", "omit"),
    *("plugins", "relative_files", "source", "source_pkgs", "source_dirs", "timid"),
)
_NEEDLESS = ("no-data-collected", "module-not-imported", "module-not-measured", "already-imported")


@dataclass(frozen=True, slots=True)
class CoverageOptions:
    """The settings under which coverage is measured in this process."""

    options: Mapping[str, Any]  # of coverage.py, by name
    file: str | None  # of its configuration, which holds the options of its plugins
    context: str  # that what is measured is recorded under, empty for none

    @classmethod
    def now(cls, context: str) -> CoverageOptions | None:
        """The settings of this process; `None` where coverage is not measured."""
        current = _current_coverage()
        if current is None:
            return None
        options = {}
        for name in _COVERAGE_OPTIONS:
            with contextlib.suppress(Exception):  # another version of coverage.py has no such option
                options[f"run:{name}"] = current.get_option(f"run:{name}")
        return cls(options, getattr(current.config, "config_file", None), context)


@contextlib.contextmanager
def measured(how: CoverageOptions | None, artifacts: RankArtifacts) -> Iterator[None]:
    """On a rank: measure while the block runs, and keep the result in `artifacts`; nothing without a `how`."""
    if how is None:
        yield
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
        yield
    finally:
        ours.stop()
        artifacts.coverage = ours.get_data().dumps()


def add_coverage(data: bytes) -> None:
    """Add what a rank has measured to what is measured in this process."""
    current = _current_coverage()
    if current is None:
        return
    import coverage

    theirs = coverage.CoverageData(no_disk=True)
    theirs.loads(data)
    current.get_data().update(theirs)


def _current_coverage() -> Any:
    coverage = sys.modules.get("coverage")
    return coverage.Coverage.current() if coverage is not None else None
