"""Execution of test code on a rank, with conditions, fixtures and attachment."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from ddpcheck.findings.errors import DDPCheckError
from ddpcheck.findings.tracebacks import for_target
from ddpcheck.gather.collectives.collective_log import log_path, record_collectives
from ddpcheck.testing import remote_pdb
from ddpcheck.testing.rank_context import RankArtifacts, TestConditions, measured
from ddpcheck.testing.rank_fixtures import FixtureMaker
from ddpcheck.worlds import rank as this_rank
from ddpcheck.worlds import wire
from ddpcheck.worlds.assert_rewriting import explain_comparisons
from ddpcheck.worlds.generators import set_generators

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclass(frozen=True, slots=True)
class Ended:
    """Outcome of a test on a rank without failure."""

    how: Literal["passed", "skipped", "xfailed"]
    reason: str = ""  # of a skip or xfail
    returned: str = ""  # repr of the type of a return value other than None


def call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], conditions: TestConditions
) -> Any:
    """Call a function passed to `ddp_world.run`; return its value, or `Ended` on skip or xfail."""
    with _under(conditions):
        return _unless_it_ends(functools.partial(function, *args, **kwargs))


def perform(body: bytes, conditions: TestConditions) -> Ended:
    """Run the body of a marked test, packed by `rank_fixtures.pack`; raises its exceptions except skip and xfail."""
    with _under(conditions) as attachment:
        result = _unless_it_ends(functools.partial(_with_fixtures, body, attachment))
        if isinstance(result, Ended):
            return result
        if result is None:
            return Ended("passed")
        this_rank.packed_result(result)
        return Ended("passed", returned=repr(type(result)))


@for_target
def _with_fixtures(body: bytes, attachment: RankArtifacts) -> Any:
    arguments, function, setups = wire.loads(body)
    with contextlib.ExitStack() as teardown:
        maker = FixtureMaker(teardown, attachment.properties)
        for fixture in setups:
            maker.make(fixture)
        return function(**{name: maker.make(value) for name, value in arguments.items()})


@for_target
def _unless_it_ends(run: Callable[[], Any]) -> Any:
    """Return the result of `run`, or `Ended` on skip or xfail."""
    try:
        return run()
    except pytest.skip.Exception as outcome:
        return Ended("skipped", outcome.msg or "")
    except pytest.xfail.Exception as outcome:
        return Ended("xfailed", outcome.msg or "")


@contextlib.contextmanager
def _under(conditions: TestConditions) -> Iterator[RankArtifacts]:
    attachment = RankArtifacts()
    log = io.StringIO()
    caught: list[warnings.WarningMessage] = []
    explain_comparisons(conditions.assert_verbosity, conditions.comparisons)
    _log_collectives()
    this_rank.save_attachment(b"")  # discard that of an earlier run
    this_rank.forget_thread_error()
    try:
        with (
            _logging(log, conditions),
            remote_pdb.available(conditions.debugger),
            warnings.catch_warnings(record=True) as caught,
            measured(conditions.coverage, attachment),
        ):
            assert caught is not None
            warnings.resetwarnings()
            warnings.filters.extend(conditions.filters)  # type: ignore[attr-defined]  # a list
            set_generators(conditions.seeds)
            try:
                with _unhandled() as unhandled:
                    yield attachment
                for warning, file, line in unhandled:
                    warnings.warn_explicit(warning, type(warning), file, line)
            except BaseException as error:
                this_rank.announce(error)
                attachment.failure = _as_pytest_shows(error, conditions)
                if conditions.post_mortem:
                    attachment.quitting = remote_pdb.post_mortem(error, text_of(attachment.failure))
                raise
    finally:
        attachment.log = log.getvalue()
        attachment.warnings = [(entry.message, entry.category, entry.filename, entry.lineno) for entry in caught]  # type: ignore[misc]
        this_rank.save_attachment(_packed(attachment))


def _log_collectives() -> None:
    """Start or reset the collective log, from which the parent detects mismatches."""
    rank = this_rank.current()
    if not (path := log_path(rank.directory, rank.rank)).exists():
        record_collectives(rank.directory, rank.rank)
    os.truncate(path, 0)  # discard an earlier run


@contextlib.contextmanager
def _unhandled() -> Iterator[list[tuple[Warning, str, int]]]:
    """Collect unhandled thread and unraisable exceptions as the same warnings that pytest issues."""
    caught: list[tuple[Warning, str, int]] = []
    hooks = threading.excepthook, sys.unraisablehook

    def note(kind: type[Warning], what: str, args: Any) -> None:
        text = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(args.exc_traceback)]
        caught.append((kind(f"{what}\n\n{text}"), *(frames[-1] if frames else ("", 0))))

    def in_thread(args: Any) -> None:
        name = args.thread.name if args.thread is not None else "<unknown>"
        note(pytest.PytestUnhandledThreadExceptionWarning, f"Exception in thread {name}", args)
        if isinstance(args.exc_value, Exception):
            this_rank.save_thread_error(name, args.exc_value)

    def unraisable(args: Any) -> None:
        title = f"{args.err_msg or 'Exception ignored in'}: {args.object!r}"
        note(pytest.PytestUnraisableExceptionWarning, title, args)

    threading.excepthook, sys.unraisablehook = in_thread, unraisable
    try:
        yield caught
    finally:
        threading.excepthook, sys.unraisablehook = hooks


def _packed(attachment: RankArtifacts) -> bytes:
    """Pickle the attachment without its unpicklable parts."""
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
def _logging(log: io.StringIO, conditions: TestConditions) -> Iterator[None]:
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


def _as_pytest_shows(error: BaseException, conditions: TestConditions) -> Any:
    """Return pytest's picklable representation of an exception, or `None` for ddpcheck errors."""
    info = pytest.ExceptionInfo.from_exception(error)
    if isinstance(error, DDPCheckError) and not _theirs(info):
        return None
    try:
        repr_style = "long" if conditions.traceback == "auto" or conditions.full_trace else conditions.traceback
        if not _theirs(info) or (isinstance(error, pytest.fail.Exception) and not error.pytrace):
            repr_style = "value"
        if repr_style == "native" and not conditions.full_trace:  # `tbfilter` is ignored by style "native"
            info.traceback = _theirs(info)
        longrepr = info.getrepr(
            showlocals=conditions.show_locals,
            style=repr_style,  # type: ignore[arg-type]
            abspath=os.getcwd() != conditions.directory,
            tbfilter=False if conditions.full_trace else lambda info: _users(info, conditions.traceback),
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


def _users(info: pytest.ExceptionInfo[BaseException], style: str) -> Any:
    """Filter a traceback to user frames, as pytest's `Function._traceback_filter` does."""
    frames = info.traceback
    shown = _theirs(info).filter(info) or frames
    if style == "auto" and len(shown) > 2:
        return type(frames)((shown[0], *(entry.with_repr_style("short") for entry in shown[1:-1]), shown[-1]))
    return shown


def _theirs(info: pytest.ExceptionInfo[BaseException]) -> Any:
    prefixes = (_PACKAGE, str(contextlib.__file__))  # fixtures run in context managers
    return type(info.traceback)(entry for entry in info.traceback if not str(entry.path).startswith(prefixes))
