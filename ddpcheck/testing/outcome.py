"""Test outcome merged from all ranks, for pytest and as HTML reports."""

from __future__ import annotations

import bdb
import copy
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from ddpcheck.findings.errors import RankError, RankFailure, UsageError
from ddpcheck.findings.report import Finding, Report
from ddpcheck.findings.wording import failure_text, format_by_text, format_ranks, pluralize_verb
from ddpcheck.testing.rank_side import Ended, RankArtifacts, text_of

REPORT_FOLDER = "--ddp-report"
_LONGEST_NAME = 150


def keep_report(folder: str | None, test: str, numbers: Iterator[int], report: Report) -> Path | None:
    """Write a test's report as a numbered HTML file in `folder`; return the path."""
    if folder is None:
        return None
    from ddpcheck.render import renderer_for

    number = next(numbers)
    path = Path(folder, f"{file_name(test)}{f'-{number}' if number > 1 else ''}.html")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(renderer_for("html").render(report), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    return path


def file_name(test: str) -> str:
    """Return a unique file name for a test, with invalid characters replaced."""
    path, bracket, parameters = test.partition("[")
    plain = path.replace("::", ".").replace("/", ".") + bracket + parameters
    name = re.sub(r"[^\w.\[\]=-]+", "-", plain)[-_LONGEST_NAME:]
    return name if name == plain else f"{name}-{hashlib.blake2b(test.encode(), digest_size=4).hexdigest()}"


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """Outcome of a test over all ranks."""

    how: Literal["passed", "skipped", "xfailed", "failed"]
    headline: str = ""  # one sentence, or the reason of a skip
    lines: tuple[str, ...] = ()  # one per group of ranks with equal outcome; the stack follows if they are stuck
    first: RankFailure | None = None  # failure that the headline describes
    mismatch: Finding | None = None  # DDP403, if it caused the failure


def merge_outcomes(ended: Mapping[int, Ended], error: RankError | None, mismatch: Finding | None = None) -> TestOutcome:
    """Merge the outcomes of ranks without failure (`ended`) and of failed ranks (`error`)."""
    ended = dict(ended)
    failures = list(error.failures) if error is not None else []
    for failure in list(failures):  # module-level skip during import on a rank
        if isinstance(failure.exception, pytest.skip.Exception):
            ended[failure.rank] = Ended("skipped", failure.exception.msg or "")
            failures.remove(failure)
    if error is not None and (failures or not error.failures):
        skipped = any(outcome.how == "skipped" for outcome in ended.values())
        waiting = all(failure.kind in ("stuck", "fell") for failure in failures)
        headline = f"{_disagreement(ended)}; {error}" if skipped and waiting else str(error)
        if mismatch is not None and not skipped:
            text, (first, second, *_) = mismatch.message.rstrip("."), mismatch.evidence
            calls = "" if first.partition(": ")[2] in text else f": {first}; {second}"
            headline = f"{mismatch.code}: {text}{calls}; {headline}"
        return TestOutcome("failed", headline, _summaries(ended, failures), failures[0] if failures else None, mismatch)
    kinds = {outcome.how for outcome in ended.values()}
    if kinds <= {"passed"}:
        return TestOutcome("passed")
    if kinds <= {"skipped"}:
        return TestOutcome("skipped", ended[min(ended)].reason)
    if "skipped" not in kinds:
        expected = {rank: outcome for rank, outcome in ended.items() if outcome.how == "xfailed"}
        return TestOutcome("xfailed", expected[min(expected)].reason)
    return TestOutcome("failed", _disagreement(ended), _summaries(ended, []))


def to_raise(verdict: TestOutcome, error: RankError | None, expected: Any = None) -> BaseException:
    """Return the exception to raise in pytest's process, if possible a rank's own exception.

    `expected` is the `raises` of an xfail mark. An exception of another type is preferred, so that the test fails.
    """
    first = verdict.first
    if expected is not None and error is not None:
        others = [item for item in error.failures if item.kind == "raised" and not isinstance(item.exception, expected)]
        first = others[0] if others else first
    if first is None or error is None:
        return pytest.fail.Exception(verdict.headline, pytrace=False)
    if isinstance(first.exception, bdb.BdbQuit):
        return pytest.exit.Exception("Quitting debugger")
    can_be_raised = (Exception, pytest.fail.Exception, pytest.exit.Exception)  # excludes KeyboardInterrupt of a rank
    if isinstance(first.exception, can_be_raised) and first.kind == "raised":
        return first.exception.with_traceback(None)
    return error.with_traceback(None)


def _disagreement(ended: Mapping[int, Ended]) -> str:
    ordered = sorted(ended.items(), key=lambda pair: (pair[1].how == "passed", pair[0]))
    return f"ranks disagree: {', '.join(format_by_text((rank, _describe_end(outcome)) for rank, outcome in ordered))}"


def _describe_end(ended: Ended) -> str:
    verb = "failed as expected" if ended.how == "xfailed" else ended.how
    return f"{verb} ({ended.reason})" if ended.reason else verb


def _summaries(ended: Mapping[int, Ended], failures: list[RankFailure]) -> tuple[str, ...]:
    """Return one line per group of equal outcomes, failures first."""
    groups: dict[tuple[str, str], list[int]] = {}
    for failure in failures:
        where = f" at {failure.location}" if failure.location and failure.location not in failure.message else ""
        groups.setdefault((failure_text(failure) + where, failure.stack), []).append(failure.rank)
    for rank, outcome in sorted(ended.items()):
        groups.setdefault((_describe_end(outcome), ""), []).append(rank)
    return tuple(
        f"{format_ranks(ranks)} {pluralize_verb(text, ranks)}" + (f"\n{stack}" if stack else "")
        for (text, stack), ranks in groups.items()
    )


def sections(verdict: TestOutcome, attachment: Mapping[int, RankArtifacts]) -> list[tuple[str, str]]:
    """Return report sections on failures; [] if pytest cannot represent the first failure."""
    first = verdict.first
    longrepr = attachment[first.rank].failure if first is not None and first.rank in attachment else None
    if first is None or longrepr is None:
        return []
    return [(f"rank {first.rank}", text_of(longrepr)), ("ranks", "\n".join(verdict.lines))]


def as_pytest_shows(
    verdict: TestOutcome, attachment: Mapping[int, RankArtifacts], test: tuple[str, int | None, str]
) -> Any:
    """Return pytest's representation of the first failure, plus one line per other outcome.

    `test` is the location of the test, as in `pytest.Item.location`.
    """
    first, longrepr = verdict.first, None
    if first is not None and first.rank in attachment and first.kind not in ("stuck", "died") and not verdict.mismatch:
        longrepr = copy.copy(attachment[first.rank].failure)
    if first is None or longrepr is None:
        longrepr = _longrepr_from_text(verdict, test)
    elif longrepr.reprcrash is not None:
        longrepr.reprcrash = copy.copy(longrepr.reprcrash)
        longrepr.reprcrash.message = f"rank {first.rank}: {longrepr.reprcrash.message}"
        if chain := getattr(longrepr, "chain", None):  # serialized by pytest-xdist
            longrepr.chain = [*chain[:-1], (chain[-1][0], longrepr.reprcrash, chain[-1][2])]
    if verdict.lines != (verdict.headline,) and hasattr(longrepr, "addsection"):
        longrepr.sections = list(longrepr.sections)
        longrepr.addsection("ranks", "\n".join(verdict.lines))
    return longrepr


def _longrepr_from_text(verdict: TestOutcome, test: tuple[str, int | None, str]) -> Any:
    """Return a representation of a failure without exception: a dead or hung rank."""
    text = verdict.headline
    if verdict.first is not None and verdict.first.traceback and not verdict.first.type.startswith("ddpcheck."):
        text = f"{verdict.first.traceback.rstrip()}\n{text}"
    try:
        from _pytest._code import code

        locations = [item.location for item in (verdict.mismatch, verdict.first) if item is not None and item.location]
        path, _, line = str(next(iter(locations), "")).rpartition(":")
        if not path:
            path, line = test[0], str((test[1] or 0) + 1)
        return code.ReprExceptionInfo(
            reprtraceback=code.ReprTraceback([code.ReprEntryNative([text + "\n"])], None, style="native"),
            reprcrash=code.ReprFileLocation(path, int(line) if line.isdigit() else 0, verdict.headline),
        )
    except (ImportError, TypeError):  # another version of pytest
        return "\n".join((text, *verdict.lines))
