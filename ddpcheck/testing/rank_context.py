"""The conditions under which a test's code runs on a rank: as far as possible those of the process of pytest.

Warning filters, logging, random numbers that a fixture has seeded, coverage, and how a failure is to be shown. All of
it is read in the parent (`TestConditions.of`) and applied on the rank, from where `RankArtifacts` comes back.

This module is light: it never imports torch.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from ddpcheck.testing.rank_coverage import CoverageData, Measuring

_COMPARISONS = ("truncation_limit_lines", "truncation_limit_chars", "assertion_text_diff_style")


@dataclass(frozen=True, slots=True)
class Style:
    """The options of pytest for tracebacks.

    Attributes:
        traceback: As in `--tb`.
        show_locals: As in `--showlocals`.
        full: As in `--full-trace`.
        verbosity: How many times `-v`.
        assertions: How many times, for assertions.
        comparisons: What the ini file says about explaining a comparison.
        directory: That paths are shown relative to.
    """

    traceback: str
    show_locals: bool
    full: bool
    verbosity: int
    assertions: int
    comparisons: Mapping[str, Any]
    directory: str


@dataclass(frozen=True, slots=True)
class RngStates:
    """States of random number generators; `None` for one that a test need not care about."""

    python: Any = None
    numpy: Any = None
    torch: Any = None

    @classmethod
    def draw_and_capture(cls) -> RngStates:
        """Draw one number from each generator and return the states: seeding, even with the last seed, changes them."""
        random.random()
        if (numpy := sys.modules.get("numpy.random")) is not None:
            numpy.random_sample()
        if (torch := _torch()) is not None:
            torch.rand(1)
        return cls.capture()

    @classmethod
    def capture(cls) -> RngStates:
        """The states in this process, without importing anything."""
        numpy = sys.modules.get("numpy.random")
        torch = _torch()
        return cls(
            random.getstate(),
            numpy.get_state(legacy=True) if numpy is not None else None,
            bytes(torch.get_rng_state().tolist()) if torch is not None else None,
        )

    def since(self, before: RngStates) -> RngStates:
        """The states that have changed: something has been seeded, drawn or imported."""
        return RngStates(
            self.python if self.python != before.python else None,
            self.numpy if repr(self.numpy) != repr(before.numpy) else None,
            self.torch if self.torch != before.torch else None,
        )

    def restore(self) -> None:
        """Make the generators of this process go on from here."""
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            import numpy

            numpy.random.set_state(self.numpy)
        if self.torch is not None:
            import torch

            torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))


def _torch() -> Any:
    """torch, where somebody has imported it."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "get_rng_state") else None


@dataclass(frozen=True, slots=True)
class TestConditions:
    """The conditions for a test's code on a rank.

    Attributes:
        filters: Of `warnings`.
        log_level: Of the root logger.
        log_format: Of a line of the log, and of its date.
        seeds: Generators that have been seeded since the test began.
        coverage: How to measure coverage, `None` when it is not measured.
        style: Of a traceback.
        debugger: Whether somebody sits at a terminal: `breakpoint()` works.
        post_mortem: Whether a failure opens the debugger.
    """

    filters: tuple[Any, ...]
    log_level: int
    log_format: tuple[str, str]
    seeds: RngStates
    coverage: Measuring | None
    style: Style
    debugger: bool
    post_mortem: bool

    @classmethod
    def of(
        cls, config: pytest.Config, *, since: RngStates | None, context: str, debugger: bool, apart: bool = True
    ) -> TestConditions:
        """Read them off this process.

        Args:
            config: pytest's.
            since: The generators when the test began.
            context: Of the test, for coverage by test.
            debugger: Whether somebody sits at a terminal.
            apart: Whether the rank is another process than the one that pytest runs in, which is measured already.
        """
        return cls(
            filters=tuple(warnings.filters),
            log_level=logging.getLogger().level,
            log_format=(_ini(config, "log_format"), _ini(config, "log_date_format")),
            seeds=RngStates.capture().since(since) if since is not None else RngStates(),
            coverage=Measuring.now(context) if apart else None,
            style=Style(
                config.getoption("tbstyle", "auto"),
                bool(config.getoption("showlocals", False)),
                bool(config.getoption("fulltrace", False)),
                config.option.verbose,
                config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS),
                _comparisons(config),
                str(config.invocation_params.dir),
            ),
            debugger=debugger,
            post_mortem=debugger and bool(config.getoption("usepdb", False)),
        )


def _ini(config: pytest.Config, name: str) -> str:
    try:
        return str(config.getoption(name, None) or config.getini(name))
    except (KeyError, ValueError):  # the logging plugin is switched off
        return ""


def _comparisons(config: pytest.Config) -> dict[str, Any]:
    found = {}
    for name in _COMPARISONS:
        with contextlib.suppress(KeyError, ValueError):  # an older pytest has no such option
            found[name] = config.getini(name)
    return {name: value for name, value in found.items() if value is not None}


@dataclass(slots=True)
class RankArtifacts:
    """The results of a test on a rank beside its outcome.

    Attributes:
        warnings: Message, category, file and line of each.
        log: What was logged, formatted.
        coverage: What was measured.
        properties: What `record_property` was told.
        failure: The failure as pytest shows it, where there was one.
        quitting: Whether whoever debugged the failure wants the session to end.
    """

    warnings: list[tuple[Warning, type[Warning], str, int]] = field(default_factory=list)
    log: str = ""
    coverage: CoverageData | None = None
    properties: list[tuple[str, object]] = field(default_factory=list)
    failure: Any = None
    quitting: bool = False
