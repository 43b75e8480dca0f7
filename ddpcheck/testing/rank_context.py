"""Test conditions, read in the pytest process and applied on a rank, which returns `RankArtifacts`."""

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


def drawn_generators() -> dict[str, Any]:
    """Draw from each generator and return the states, to detect later reseeding."""
    random.random()
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.random_sample()
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_rng_state"):
        torch.rand(1)
    return generators(thorough=True)


@dataclass(frozen=True, slots=True)
class TestConditions:
    """Conditions for test code on a rank."""

    filters: tuple[Any, ...]  # `warnings.filters`
    log_level: int
    log_format: tuple[str, str]  # (log_format, log_date_format)
    seeds: Mapping[str, Any]  # generator states changed since the test began
    coverage: CoverageOptions | None
    traceback: str  # --tb
    show_locals: bool
    full_trace: bool
    verbosity: int
    assert_verbosity: int
    comparisons: Mapping[str, Any]  # ini options for assertion explanations
    directory: str  # base of relative paths
    debugger: bool  # terminal available: `breakpoint()` works
    post_mortem: bool  # a failure opens the debugger

    @classmethod
    def of(cls, item: pytest.Item, *, since: Mapping[str, Any], debugger: bool) -> TestConditions:
        config = item.config
        per_test = config.getoption("cov_context", None) == "test"
        return cls(
            filters=tuple(warnings.filters),
            log_level=logging.getLogger().level,
            log_format=(str(_ini(config, "log_format") or ""), str(_ini(config, "log_date_format") or "")),
            seeds=changed_since(since),
            coverage=CoverageOptions.of_this_process(f"{item.nodeid}|run" if per_test else ""),
            traceback=config.getoption("tbstyle", "auto"),
            show_locals=bool(config.getoption("showlocals", False)),
            full_trace=bool(config.getoption("fulltrace", False)),
            verbosity=config.option.verbose,
            assert_verbosity=config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS),
            comparisons={name: value for name in _COMPARISONS if (value := _ini(config, name)) is not None},
            directory=str(config.invocation_params.dir),
            debugger=debugger,
            post_mortem=debugger and bool(config.getoption("usepdb", False)),
        )


def _ini(config: pytest.Config, name: str) -> Any:
    try:
        return config.getoption(name, None) or config.getini(name)
    except (KeyError, ValueError):  # logging plugin disabled, or option missing in this pytest
        return None


@dataclass(slots=True)
class RankArtifacts:
    """Artifacts of a test on a rank, besides the outcome."""

    warnings: list[tuple[Warning, type[Warning], str, int]] = field(default_factory=list)  # last: file, line
    log: str = ""
    coverage: bytes = b""  # `CoverageData.dumps()`, b"" if not measured
    properties: list[tuple[str, object]] = field(default_factory=list)  # from `record_property`
    failure: Any = None  # representation by pytest
    quitting: bool = False  # user quit the debugger to end the session


# No data files and no `coverage combine`, so this works under pytest-cov, with and without xdist, and under
# `coverage run`. Public API of coverage.py only: `Coverage.current`, `get_option`, `CoverageData.dumps`, `update`
# (https://coverage.readthedocs.io/en/latest/api_coverage.html).
_COVERAGE_OPTIONS = (  # options of section `run`
    *("branch", "concurrency", "core", "cover_pylib", "dynamic_context", "include", "omit"),
    *("plugins", "relative_files", "source", "source_pkgs", "source_dirs", "timid"),
)
_NEEDLESS = ("no-data-collected", "module-not-imported", "module-not-measured", "already-imported")


@dataclass(frozen=True, slots=True)
class CoverageOptions:
    """Coverage settings of this process."""

    options: Mapping[str, Any]  # coverage.py option name -> value
    file: str | None  # config file, which includes plugin options
    context: str  # coverage context, or '' for none

    @classmethod
    def of_this_process(cls, context: str) -> CoverageOptions | None:
        current = _current_coverage()
        if current is None:
            return None
        options = {}
        for name in _COVERAGE_OPTIONS:
            with contextlib.suppress(Exception):  # unknown in another version of coverage.py
                options[f"run:{name}"] = current.get_option(f"run:{name}")
        return cls(options, getattr(current.config, "config_file", None), context)


@contextlib.contextmanager
def measured(how: CoverageOptions | None, artifacts: RankArtifacts) -> Iterator[None]:
    """Measure coverage of the block into `artifacts`; no-op if `how` is `None`."""
    if how is None:
        yield
        return
    import coverage

    cov = coverage.Coverage(data_file=None, config_file=how.file or False, messages=False)
    for name, value in how.options.items():
        with contextlib.suppress(Exception):
            cov.set_option(name, value)
    cov.set_option("run:disable_warnings", list(_NEEDLESS))
    cov.start()
    try:
        if how.context:
            cov.switch_context(how.context)
        yield
    finally:
        cov.stop()
        artifacts.coverage = cov.get_data().dumps()


def add_coverage(data: bytes) -> None:
    """Merge the coverage data of a rank into this process."""
    current = _current_coverage()
    if current is None:
        return
    import coverage

    rank_data = coverage.CoverageData(no_disk=True)
    rank_data.loads(data)
    current.get_data().update(rank_data)


def _current_coverage() -> Any:
    coverage = sys.modules.get("coverage")
    return coverage.Coverage.current() if coverage is not None else None
