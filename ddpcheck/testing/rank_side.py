"""Execution of test code on a rank: conditions from pytest, fixtures, outcome and artifacts."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import random
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from ddpcheck.findings.errors import DDPCheckError
from ddpcheck.findings.tracebacks import runs_target
from ddpcheck.gather.collectives.collective_log import log_path, record_collectives
from ddpcheck.testing import remote_pdb
from ddpcheck.testing.rank_fixtures import FixtureMaker
from ddpcheck.worlds import rank as this_rank
from ddpcheck.worlds import wire
from ddpcheck.worlds.assert_rewriting import explain_comparisons
from ddpcheck.worlds.rank_setup import changed_since, generators, set_generators

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_COMPARISONS = ("truncation_limit_lines", "truncation_limit_chars", "assertion_text_diff_style")


def drawn_generators() -> dict[str, Any]:
    """Draw a random number from each generator; return the states, to detect later reseeding."""
    random.random()
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.random_sample()
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_rng_state"):
        torch.rand(1)
    return generators(thorough=True)


@dataclass(frozen=True, slots=True)
class TestConditions:
    """State and options of pytest's process that test code on a rank needs."""

    filters: tuple[Any, ...]  # `warnings.filters`
    log_level: int
    log_format: tuple[str, str]  # (log_format, log_date_format)
    seeds: Mapping[str, Any]  # random generator states that changed since the test began
    coverage: CoverageOptions | None
    traceback: str  # --tb
    show_locals: bool
    full_trace: bool
    verbosity: int
    assert_verbosity: int
    comparisons: Mapping[str, Any]  # ini options for assertion explanations
    directory: str  # working directory of pytest, for relative paths in output
    debugger: bool  # True if there is a terminal, so that `breakpoint()` works
    post_mortem: bool  # True if a failure opens the debugger (`--pdb`)

    @classmethod
    def from_item(cls, item: pytest.Item, *, since: Mapping[str, Any], debugger: bool) -> TestConditions:
        config = item.config
        per_test = config.getoption("cov_context", None) == "test"
        return cls(
            filters=tuple(warnings.filters),
            log_level=logging.getLogger().level,
            log_format=(str(_option_of(config, "log_format") or ""), str(_option_of(config, "log_date_format") or "")),
            seeds=changed_since(since),
            coverage=CoverageOptions.of_this_process(f"{item.nodeid}|run" if per_test else ""),
            traceback=config.getoption("tbstyle", "auto"),
            show_locals=bool(config.getoption("showlocals", False)),
            full_trace=bool(config.getoption("fulltrace", False)),
            verbosity=config.option.verbose,
            assert_verbosity=config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS),
            comparisons={name: value for name in _COMPARISONS if (value := _option_of(config, name)) is not None},
            directory=str(config.invocation_params.dir),
            debugger=debugger,
            post_mortem=debugger and bool(config.getoption("usepdb", False)),
        )


def _option_of(config: pytest.Config, name: str) -> Any:
    try:
        return config.getoption(name, None) or config.getini(name)
    except (KeyError, ValueError):  # logging plugin disabled, or option missing in this pytest
        return None


@dataclass(slots=True)
class RankArtifacts:
    """Data that a test produced on a rank, apart from its outcome."""

    warnings: list[tuple[Warning, type[Warning], str, int]] = field(default_factory=list)  # str, int: file, line
    log: str = ""
    coverage: bytes = b""  # `CoverageData.dumps()`, b"" if not measured
    properties: list[tuple[str, object]] = field(default_factory=list)  # from `record_property`
    failure: Any = None  # representation by pytest
    quitting: bool = False  # user quit the debugger to end the session


# --- On a rank -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ended:
    """Outcome of a test on a rank without failure."""

    how: Literal["passed", "skipped", "xfailed"]
    reason: str = ""  # of a skip or xfail
    returned: str = ""  # repr of the type of a return value other than None


def call_on_rank(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], conditions: TestConditions
) -> Any:
    """Call a function for `ddp_world.run`; return its value, or `Ended` on skip or xfail."""
    with _under_conditions(conditions):
        return _outcome_of(functools.partial(function, *args, **kwargs))


def run_test_body(body: bytes, conditions: TestConditions) -> Ended:
    """Run a test body packed by `rank_fixtures.pack_test`; return skip and xfail, raise other exceptions."""
    with _under_conditions(conditions) as attachment:
        result = _outcome_of(functools.partial(_with_fixtures, body, attachment))
        if isinstance(result, Ended):
            return result
        if result is None:
            return Ended("passed")
        this_rank.packed_result(result)
        return Ended("passed", returned=repr(type(result)))


@runs_target
def _with_fixtures(body: bytes, attachment: RankArtifacts) -> Any:
    arguments, function, setups = wire.loads(body)
    with contextlib.ExitStack() as teardown:
        maker = FixtureMaker(teardown, attachment.properties)
        for fixture in setups:
            maker.make(fixture)
        return function(**{name: maker.make(value) for name, value in arguments.items()})


@runs_target
def _outcome_of(run: Callable[[], Any]) -> Any:
    """Return the result of `run`, or `Ended` on skip or xfail."""
    try:
        return run()
    except (pytest.skip.Exception, pytest.xfail.Exception) as outcome:
        return Ended("skipped" if isinstance(outcome, pytest.skip.Exception) else "xfailed", outcome.msg or "")


@contextlib.contextmanager
def _under_conditions(conditions: TestConditions) -> Iterator[RankArtifacts]:
    attachment = RankArtifacts()
    log = io.StringIO()
    caught: list[warnings.WarningMessage] = []
    explain_comparisons(conditions.assert_verbosity, conditions.comparisons)
    _log_collectives()
    this_rank.save_attachment(b"")  # discard that of an earlier run
    this_rank.forget_thread_error()
    try:
        with (
            _capturing_log(log, conditions),
            remote_pdb.breakpoints_on_rank(conditions.debugger),
            warnings.catch_warnings(record=True) as caught,
            measure_coverage(conditions.coverage, attachment),
        ):
            assert caught is not None
            warnings.resetwarnings()
            warnings.filters.extend(conditions.filters)  # type: ignore[attr-defined]  # a list
            set_generators(conditions.seeds)
            try:
                with _collecting_unhandled() as unhandled:
                    yield attachment
                for warning, file, line in unhandled:
                    warnings.warn_explicit(warning, type(warning), file, line)
            except BaseException as error:
                this_rank.announce(error)
                attachment.failure = _longrepr_of(error, conditions)
                if conditions.post_mortem:
                    attachment.quitting = remote_pdb.post_mortem(error, text_of(attachment.failure))
                raise
    finally:
        attachment.log = log.getvalue()
        attachment.warnings = [(entry.message, entry.category, entry.filename, entry.lineno) for entry in caught]  # type: ignore[misc]
        this_rank.save_attachment(_pickle_artifacts(attachment))


def _log_collectives() -> None:
    """Start or clear the log of collectives, from which the parent detects mismatches."""
    rank = this_rank.current()
    if not (path := log_path(rank.directory, rank.rank)).exists():
        record_collectives(rank.directory, rank.rank)
    os.truncate(path, 0)  # discard an earlier run


@contextlib.contextmanager
def _collecting_unhandled() -> Iterator[list[tuple[Warning, str, int]]]:
    """Collect unhandled thread and unraisable exceptions as the same warnings that pytest issues."""
    caught: list[tuple[Warning, str, int]] = []
    hooks = threading.excepthook, sys.unraisablehook

    def add_warning(kind: type[Warning], what: str, args: Any) -> None:
        text = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(args.exc_traceback)]
        caught.append((kind(f"{what}\n\n{text}"), *(frames[-1] if frames else ("", 0))))

    def on_thread_error(args: Any) -> None:
        name = args.thread.name if args.thread is not None else "<unknown>"
        add_warning(pytest.PytestUnhandledThreadExceptionWarning, f"Exception in thread {name}", args)
        if isinstance(args.exc_value, Exception):
            this_rank.save_thread_error(name, args.exc_value)

    def on_unraisable(args: Any) -> None:
        title = f"{args.err_msg or 'Exception ignored in'}: {args.object!r}"
        add_warning(pytest.PytestUnraisableExceptionWarning, title, args)

    threading.excepthook, sys.unraisablehook = on_thread_error, on_unraisable
    try:
        yield caught
    finally:
        threading.excepthook, sys.unraisablehook = hooks


def _pickle_artifacts(attachment: RankArtifacts) -> bytes:
    try:
        return wire.dumps(attachment)
    except Exception:
        attachment.warnings = [
            ((category if category.__module__ == "builtins" else UserWarning)(str(message)), category, file, line)
            for message, category, file, line in attachment.warnings
        ]
        for name, _, _ in wire.unsendable({"warnings": attachment.warnings, "properties": attachment.properties}):
            setattr(attachment, name, [])
        return wire.dumps(attachment)


@contextlib.contextmanager
def _capturing_log(log: io.StringIO, conditions: TestConditions) -> Iterator[None]:
    handler = logging.StreamHandler(log)
    handler.setFormatter(logging.Formatter(conditions.log_format[0] or None, conditions.log_format[1] or None))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(conditions.log_level)
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(handler)


def _longrepr_of(error: BaseException, conditions: TestConditions) -> Any:
    """Return pytest's representation of an exception; `None` if unpicklable or an error of ddpcheck."""
    info = pytest.ExceptionInfo.from_exception(error)
    if isinstance(error, DDPCheckError) and not _user_entries(info):
        return None
    try:
        repr_style = "long" if conditions.traceback == "auto" or conditions.full_trace else conditions.traceback
        if not _user_entries(info) or (isinstance(error, pytest.fail.Exception) and not error.pytrace):
            repr_style = "value"
        if repr_style == "native" and not conditions.full_trace:  # `tbfilter` is ignored by style "native"
            info.traceback = _user_entries(info)
        longrepr = info.getrepr(
            showlocals=conditions.show_locals,
            style=repr_style,  # type: ignore[arg-type]
            abspath=os.getcwd() != conditions.directory,
            tbfilter=False if conditions.full_trace else lambda info: _filter_traceback(info, conditions.traceback),
            funcargs=True,
            truncate_locals=conditions.verbosity <= 1,
            chain=True,
        )
        wire.loads(wire.dumps(longrepr))
    except Exception:  # user objects may raise in __repr__
        return None
    return longrepr


def text_of(shown: Any) -> str:
    """Return a failure as printed by pytest, without colors; '' for `None`."""
    if shown is None:
        return ""
    try:
        from _pytest._io import TerminalWriter

        text = io.StringIO()
        shown.toterminal(TerminalWriter(text))
    except Exception:  # another version of pytest
        return str(shown)  # loses the indentation of the first line
    return text.getvalue().strip("\n")


def _filter_traceback(info: pytest.ExceptionInfo[BaseException], style: str) -> Any:
    """Filter a traceback to user frames, as pytest's `Function._traceback_filter` does."""
    frames = info.traceback
    shown = _user_entries(info).filter(info) or frames
    if style == "auto" and len(shown) > 2:
        return type(frames)((shown[0], *(entry.with_repr_style("short") for entry in shown[1:-1]), shown[-1]))
    return shown


def _user_entries(info: pytest.ExceptionInfo[BaseException]) -> Any:
    prefixes = (_PACKAGE, str(contextlib.__file__))  # fixtures run in context managers
    return type(info.traceback)(entry for entry in info.traceback if not str(entry.path).startswith(prefixes))


# --- Coverage --------------------------------------------------------------------------------------------------------

# No data files and no `coverage combine`, so this works under pytest-cov, with and without xdist, and under
# `coverage run`. Public API of coverage.py only: `Coverage.current`, `get_option`, `CoverageData.dumps`, `update`
# (https://coverage.readthedocs.io/en/latest/api_coverage.html).
_COVERAGE_OPTIONS = (  # options of section `run`
    *("branch", "concurrency", "core", "cover_pylib", "dynamic_context", "include", "omit"),
    *("plugins", "relative_files", "source", "source_pkgs", "source_dirs", "timid"),
)
_DISABLED_WARNINGS = ("no-data-collected", "module-not-imported", "module-not-measured", "already-imported")


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
def measure_coverage(settings: CoverageOptions | None, artifacts: RankArtifacts) -> Iterator[None]:
    """Measure coverage of the block into `artifacts`; no-op if `settings` is `None`."""
    if settings is None:
        yield
        return
    import coverage

    cov = coverage.Coverage(data_file=None, config_file=settings.file or False, messages=False)
    for name, value in settings.options.items():
        with contextlib.suppress(Exception):
            cov.set_option(name, value)
    cov.set_option("run:disable_warnings", list(_DISABLED_WARNINGS))
    cov.start()
    try:
        if settings.context:
            cov.switch_context(settings.context)
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
