"""The worlds of a check: sending ranks and the single process to work, and what is kept when one of them fails.

This module is light: torch is only imported on the ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, Protocol, Self, TypeVar

from ddpcheck.findings.errors import (
    EXIT_HANG,
    EXIT_TARGET,
    EXIT_USAGE,
    DdpcheckError,
    HangError,
    RankError,
    TargetError,
    UsageError,
)
from ddpcheck.findings.evidence.collectives import Call
from ddpcheck.findings.evidence.steps import NoExplanation
from ddpcheck.findings.exception_origin import as_bug
from ddpcheck.findings.report import Finding, Location, ReportError
from ddpcheck.gather.collectives.collective_log import read_log
from ddpcheck.harness import RankHosts, Watch, World
from ddpcheck.judge.rank_failure import judge_empty_shards, judge_failure
from ddpcheck.report import calls
from ddpcheck.report.checking.check_state import CheckOptions, CheckState
from ddpcheck.report.checking.collective_mismatch_watch import CollectiveMismatchWatch
from ddpcheck.report.checking.judging import judge_wrapper_failure
from ddpcheck.worlds import preloading

if TYPE_CHECKING:
    from ddpcheck.recipe.recipe import Recipe

_NO_GROUP = ("process group", "init_process_group", "not been initialized")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class PhaseFuture(Protocol[Result]):
    """A phase that is running."""

    def result(self) -> list[Result]:
        """Wait for the answers, one a rank; raises `RankError` where a rank fails."""


class PhaseWorld(Protocol):
    """A world as a check needs it: its ranks run phases.

    Attributes:
        directory: Holds the ranks' logs of collectives.
        failed: Whether a phase failed, so that no other can run.
        closed: Whether it is closed.
    """

    directory: Path
    failed: bool
    closed: bool

    def run(self, call: Callable[[], Result], /, *, timeout: float | None = None) -> list[Result]:
        """Run a phase, and wait for its answers, one a rank; raises `RankError` where a rank fails."""

    def start(self, call: Callable[[], Result], /) -> PhaseFuture[Result]:
        """Start a phase, and do not wait."""

    def close(self) -> None:
        """End the ranks."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class MakeWorld(Protocol):
    """Makes the worlds of a check, as the constructor of `World` does."""

    def __call__(
        self,
        world_size: int,
        /,
        *,
        backend: str,
        device: str,
        timeout: float,
        process_group: bool,
        preload: Sequence[str],
        hash_seeds: bool,
        watch: Watch | None,
        hosts: RankHosts | None,
    ) -> PhaseWorld: ...


class CheckStopped(Exception):
    """The rest of the check cannot be run; the reason is in the state already."""


class CheckWorlds:
    """A world of ranks and a single process at work on a target, and the `CheckState` that comes of it.

    Where `reference` is given, the results of the single process are those of that finished check of the same target.
    """

    def __init__(
        self,
        target: Recipe | str,
        asked: CheckOptions,
        *,
        progress: Callable[[str], None],
        hosts: RankHosts | None = None,
        make_world: MakeWorld = World,
        reference: CheckState | None = None,
    ) -> None:
        self.target = target
        self.asked = asked
        self.progress = progress
        self.hosts = hosts
        self.make_world = make_world
        self.reference = reference
        self.state = CheckState(asked)
        self._alone_in_group = False
        self.single_hang = ""
        self._packing_checked = False
        self._earlier: list[Callable[[], None]] = [
            partial(calls.single_process.start, target, asked.seed, asked.world_size)
        ]

    def _start_worlds(self, stack: contextlib.ExitStack) -> None:
        with self.state.log.timed("start"):
            self.progress(f"starting {self.asked.world_size} ranks")
            self.world = stack.enter_context(self._make_world(self.asked.world_size, group=True))
            if self.reference is None:
                self.single = stack.enter_context(self._make_world(1, group=False))
            self._worlds = stack

    def _make_world(self, world_size: int, *, group: bool) -> PhaseWorld:
        return self.make_world(
            world_size,
            backend=self.asked.backend if group else "gloo",
            device=self.asked.device,
            timeout=self.asked.timeout,
            process_group=group,
            preload=(*preloading.DDP, *calls.MODULES, *self.asked.preload),
            hash_seeds=group,
            watch=CollectiveMismatchWatch() if group else None,
            hosts=self.hosts if group else None,
        )

    # Ranks

    def _all(
        self, phase: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> list[Result]:
        return self.world.run(partial(phase, *args, **kwargs))

    def _explained(
        self,
        what: str,
        otherwise: Result,
        phase: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> list[Result]:
        """As `_all`, for a phase that only explains: a failure on a rank is noted, and `otherwise` returned."""
        try:
            results = self.world.run(partial(calls.try_call, phase, *args, **kwargs))
        except RankError as error:
            if not [r for r in error.results.values() if self.state.log.add_unexplained(what, r)]:
                raise
            self._skip_rest(f"the ranks could not go on after this had failed: {what}")
        for result in results:
            self.state.log.add_unexplained(what, result)
        return [otherwise if isinstance(result, NoExplanation) else result for result in results]

    def _start_single(self, call: Callable[[], Result]) -> PhaseFuture[Result]:
        self._last_single = call
        return self.single.start(call)

    def _settle_single(self, pending: PhaseFuture[Result]) -> Result | None:
        """The result of the single process, or None when it cannot be had; then the reason is noted."""
        try:
            return pending.result()[0]
        except RankError as error:
            first = error.first
            if first is not None and isinstance(first.exception, UsageError):
                raise
            if first is not None and first.bug:
                self.state.log.add_bug(ReportError(first.bug, EXIT_USAGE, error.detail))
                self.state.single.skipped = f"the single process {first.message.removeprefix('rank 0 ')}"
                return None
            said = str(first.message if first else error).removeprefix("rank 0 ")
            if first is not None and "silenced" in first.place:
                self.state.single.skipped = f"not comparable with random numbers silenced: the single process {said}"
                return None
            if isinstance(error, HangError):
                self.single_hang = f"the single process hung: {error}"
                self.state.single.skipped = self.single_hang
                return None
            if not self._alone_in_group and any(words in said for words in _NO_GROUP):
                retried: Result | None = self._retry_in_group()
                return retried
            self.state.single.skipped = f"the single process {said}"
            return None

    def _retry_in_group(self) -> Any:
        """Models that insist on a process group get one of a single rank."""
        self._alone_in_group = True
        self.state.log.notes.append(
            "the single process has a process group of one, since the model does not run without"
        )
        last = self._last_single
        self.single = self._worlds.enter_context(self._make_world(1, group=False))
        for earlier in (calls.single_process.join_alone, *self._earlier):
            if self._settle_single(self._start_single(earlier)) is None and self.state.single.skipped:
                return None
        return None if last is self._earlier[-1] else self._settle_single(self._start_single(last))

    def _logs(self) -> list[list[Call]]:
        return [read_log(self.world.directory, rank) for rank in range(self.asked.world_size)]

    # Bookkeeping

    @contextlib.contextmanager
    def _phase(self, name: str, words: str) -> Iterator[None]:
        self.progress(words)
        with self.state.log.in_part(name):
            try:
                yield
            except TargetError as error:
                self.state.log.error = ReportError(str(error), EXIT_TARGET, error.detail)
                raise CheckStopped from error

    def _skip_rest(self, reason: str) -> NoReturn:
        self.state.log.rest_skipped = reason
        raise CheckStopped

    def _fail(self, error: RankError) -> None:
        """A world failed: keep the root cause, and why the rest was not checked."""
        first = error.first
        if first is not None and isinstance(first.exception, UsageError):
            raise first.exception
        if first is not None and type(first.exception) is DdpcheckError:  # what a phase of ours returned cannot be sent
            first = dataclasses.replace(first, bug=str(as_bug(first.exception, first.place)))
        if first is not None and first.bug:
            self.state.log.error = ReportError(f"rank {first.rank}: {first.bug}", EXIT_USAGE, error.detail)
            return
        if empty := judge_empty_shards(error, self.asked.world_size):
            self.state.findings += empty
            self.state.log.rest_skipped = f"DDP405: {error.first.exception}" if error.first else ""
            return
        found = judge_wrapper_failure(self.state, error)
        found = found or judge_failure(error, self._logs(), self.asked.world_size)
        if first is not None and isinstance(first.exception, DdpcheckError):
            everywhere = len({f.rank for f in error.failures if f.kind == "raised"}) == self.asked.world_size
            self.state.findings += [] if everywhere else found
            where = "" if everywhere else f"rank {first.rank}: "
            printed = f"what rank {first.rank} printed, its last lines:\n{first.output}" if first.output.strip() else ""
            detail = "\n".join(filter(None, (first.exception.detail, printed)))
            self.state.log.error = ReportError(f"{where}{first.exception}", EXIT_TARGET, detail)
        else:
            self.state.findings += found
            stuck = isinstance(error, HangError) or any(finding.code == "DDP403" for finding in found)
            self.state.log.error = ReportError(str(error), EXIT_HANG if stuck else EXIT_TARGET, error.detail)

    def _fail_by_bug(self, error: Exception) -> None:
        """Something in this process raised that should not have: keep it, and judge what there is."""
        bug = as_bug(error)
        self.state.log.error = ReportError(str(bug), EXIT_USAGE, bug.detail)

    def _add(self, found: Sequence[Finding]) -> None:
        """Keep findings, with the lines that made their first subjects."""
        nameless = sorted({finding.subjects[0] for finding in found if finding.location is None})
        by_rank: list[dict[str, Location]] = []
        try:
            by_rank = self._lines_of(nameless) if nameless else []
        finally:
            for finding in found:
                where = next((lines[finding.subjects[0]] for lines in by_rank if finding.subjects[0] in lines), None)
                self.state.findings.append(finding if where is None else dataclasses.replace(finding, location=where))

    def _lines_of(self, names: Sequence[str]) -> list[dict[str, Location]]:
        """By rank, the lines that made parameters, buffers and modules, as far as they are known."""
        return self._explained("which line made what", {}, calls.model_build.locations, names)

    def _locate_module(self) -> dict[str, Location]:
        module = (self.state.single.analysis.coupling.module if self.state.single.analysis else None) or ""
        if not module or self.world.failed or self.world.closed:
            return {}
        with contextlib.suppress(CheckStopped, RankError):
            return self._lines_of([module])[0]
        return {}
