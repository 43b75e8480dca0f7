"""The results of the ranks of one test, for its report: output, logs, warnings, coverage, failures.

This module is light: it never imports torch.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import pytest

from ddpcheck.testing import rank_coverage
from ddpcheck.testing.outcome import TestOutcome
from ddpcheck.testing.rank_context import RankArtifacts
from ddpcheck.testing.rank_side import text_of
from ddpcheck.worlds import wire


class Lent(Protocol):
    """The ranks of a test: a `World` of its own, or the ranks of a launcher."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def failed(self) -> bool:
        """Whether the last run failed."""

    def run(self, fn: Callable[..., Any], /, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call a function on every rank."""

    def output(self, rank: int) -> str:
        """The output of a rank."""

    def attachment(self, rank: int) -> bytes:
        """The attachment of a rank."""


class Record:
    """The results of one test's ranks so far.

    Attributes:
        output_collectors: For each world that the test has held, what keeps all that its ranks have printed.
        shown: What the report is to show instead of the traceback in this process, if anything.
        explained: An error of `ddp_world.run`, and what the report says of it beside the traceback in this process.
        failed: Whether the test has failed: nobody should get its ranks.
        quitting: Whether whoever did wants the session to end.
    """

    def __init__(self, item: pytest.Item) -> None:
        self.output_collectors: list[Callable[[], None]] = []
        self.shown: Any = None
        self.explained: tuple[BaseException, list[tuple[str, str]]] | None = None
        self.failed = False
        self.quitting = False
        self._item = item
        self._warned: set[object] = set()

    def unpack(self, world: Lent) -> dict[int, RankArtifacts]:
        """Take what the ranks have left: add their coverage, warn of what they were warned of; returns all of it."""
        found = {}
        for rank in range(world.world_size):
            data = world.attachment(rank)
            if not data:
                continue
            attachment: RankArtifacts = wire.loads(data)
            found[rank] = attachment
            if attachment.coverage is not None:
                rank_coverage.add(attachment.coverage)
            if attachment.log.strip():
                self._item.add_report_section("call", f"log of {_whose(rank, world)}", attachment.log)
            known = self._item.user_properties
            known += [each for each in attachment.properties if each not in known]
            self.quitting |= attachment.quitting
        for attachment in found.values():
            self._warn(attachment)
        return found

    def _warn(self, attachment: RankArtifacts) -> None:
        for message, category, file, line in attachment.warnings:
            key = (str(message), category, file, line)
            if key not in self._warned:  # every rank says the same as a rule
                self._warned.add(key)
                warnings.warn_explicit(message, category, file, line)

    def sections_of(self, error: BaseException | None) -> list[tuple[str, str]]:
        """The sections of the report on an error, beside the traceback in this process."""
        return self.explained[1] if self.explained is not None and self.explained[0] is error else []

    def collect_output(self) -> None:
        """Have all that the ranks have printed."""
        for collect_output in self.output_collectors:
            collect_output()

    def keep_output(self, world: Lent, texts: Mapping[int, str]) -> None:
        """Keep what the ranks have printed."""
        for rank, text in texts.items():
            if text.strip():
                self._item.add_report_section("call", f"stdout of {_whose(rank, world)}", text)


def _whose(rank: int, world: Lent) -> str:
    return f"rank {rank} of {world.world_size}"


def sections(verdict: TestOutcome, attachment: Mapping[int, RankArtifacts]) -> list[tuple[str, str]]:
    """The failures of the ranks as sections of a report; none where no rank has sent one as pytest shows it."""
    first = verdict.first
    shown = attachment[first.rank].failure if first is not None and first.rank in attachment else None
    if first is None or shown is None:
        return []
    return [(f"rank {first.rank}", text_of(shown)), ("ranks", "\n".join(verdict.lines))]


def as_pytest_shows(
    verdict: TestOutcome, attachment: Mapping[int, RankArtifacts], test: tuple[str, int | None, str]
) -> Any:
    """A test's failure on the ranks, as pytest shows a failure: the first one whole, a line for each of the others.

    Args:
        verdict: What has become of the test.
        attachment: That they have brought back.
        test: Where the test is, as in `pytest.Item.location`.
    """
    first = verdict.first
    shown = None
    if first is not None and first.rank in attachment and first.kind not in ("stuck", "died"):
        shown = copy.copy(attachment[first.rank].failure)
    if shown is None:
        shown = _from_text(verdict, test)
    elif shown.reprcrash is not None:
        shown.reprcrash = copy.copy(shown.reprcrash)
        assert first is not None
        shown.reprcrash.message = f"rank {first.rank}: {shown.reprcrash.message}"
        if chain := getattr(shown, "chain", None):  # what pytest-xdist sends
            shown.chain = [*chain[:-1], (chain[-1][0], shown.reprcrash, chain[-1][2])]
    if verdict.lines != (verdict.headline,) and hasattr(shown, "addsection"):
        shown.sections = list(shown.sections)
        shown.addsection("ranks", "\n".join(verdict.lines))
    return shown


def _from_text(verdict: TestOutcome, test: tuple[str, int | None, str]) -> Any:
    """A failure of which there is no exception: a rank that died, or hangs."""
    text = verdict.headline
    if verdict.first is not None and verdict.first.traceback and not verdict.first.type.startswith("ddpcheck."):
        text = f"{verdict.first.traceback.rstrip()}\n{text}"
    try:
        from _pytest._code import code

        path, _, line = (verdict.first.location if verdict.first is not None else "").rpartition(":")
        if not path:
            path, line = test[0], str((test[1] or 0) + 1)
        return code.ReprExceptionInfo(
            reprtraceback=code.ReprTraceback([code.ReprEntryNative([text + "\n"])], None, style="native"),
            reprcrash=code.ReprFileLocation(path, int(line) if line.isdigit() else 0, verdict.headline),
        )
    except (ImportError, TypeError):  # another version of pytest
        return "\n".join((text, *verdict.lines))
