"""Worlds of a check: run ranks and single process, record causes of failure."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from ddpcheck.findings import errors
from ddpcheck.findings.evidence.modules import WrappedModule
from ddpcheck.findings.evidence.steps import Call, NoExplanation
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location, ReportError
from ddpcheck.findings.tracebacks import as_bug
from ddpcheck.findings.wording import format_ranks
from ddpcheck.gather.collectives.collective_log import log_path, read_log
from ddpcheck.harness import RunFuture, World, start_world
from ddpcheck.report import calls
from ddpcheck.report.checking.check_state import CheckOptions, CheckState
from ddpcheck.report.checking.judging import judge_wrapper_failure
from ddpcheck.rules.collectives.ddp403_collective_mismatch import judge_collectives
from ddpcheck.rules.collectives.ddp405_uneven_iterations import judge_empty_shards
from ddpcheck.rules.collectives.diagnose import diagnose
from ddpcheck.rules.collectives.first_divergence import mismatch_number, ranks_in_complete_collective
from ddpcheck.rules.collectives.timelines import timelines_of_failure
from ddpcheck.trace.failures import FailureFacts
from ddpcheck.trace.rank_params import RankParams
from ddpcheck.worlds import rank as this_rank
from ddpcheck.worlds.launchers.leader import Leader

if TYPE_CHECKING:
    from ddpcheck.recipe.recipe import Recipe

QUIET = 2.0  # seconds after which the progress display names the unfinished ranks

_NO_GROUP = ("process group", "init_process_group", "not been initialized")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class CheckStopped(Exception):
    """Stop of the check before its end; the state already has the reason."""


class PhaseProgress:
    """Progress display: the current phase and, after a while, the unfinished ranks."""

    def __init__(self, show: Callable[[str], None] | None) -> None:
        self._show = show or (lambda _words: None)
        self._words = self._shown = ""
        self._started = time.monotonic()

    def __call__(self, words: str) -> None:
        self._words = self._shown = words
        self._started = time.monotonic()
        self._show(words)

    def wait_for(self, running: frozenset[int]) -> None:
        """Show the unfinished ranks and the seconds since the phase began."""
        seconds = time.monotonic() - self._started
        if running and seconds >= QUIET:
            text = f"{self._words}: {int(seconds)} s, waiting for {format_ranks(running)}"
            if text != self._shown:
                self._shown = text
                self._show(text)


class CollectiveMismatchWatch:
    """Early detection of ranks that wait in a collective which other ranks never call.

    Passed to `start_world` as `watch`. Reports only after `patience` seconds without progress.
    """

    def __init__(self, patience: float = 2.0) -> None:
        self._patience = patience
        self._first_seen: dict[tuple[int, ...], float] = {}

    def __call__(self, world: World, finished: frozenset[int], running: frozenset[int]) -> str | None:
        collectives = {rank: this_rank.read_slots(world.directory, rank).collective for rank in running}
        if not running or not all(collectives.values()):
            self._first_seen.clear()  # a running rank may still join the collective
            return None
        paths = [log_path(world.directory, rank) for rank in range(world.world_size)]
        sizes = tuple(path.stat().st_size if path.exists() else 0 for path in paths)
        since = self._first_seen.setdefault(sizes, time.monotonic())
        if time.monotonic() - since < self._patience:
            return None
        logs = [read_log(world.directory, rank) for rank in range(world.world_size)]
        findings = judge_collectives(logs, ranks_in_complete_collective(logs, collectives))
        return findings[0].message.rstrip(".") if findings else None


@dataclass
class CheckWorlds:
    """Processes of a check: the ranks and the single process, with the resulting `CheckState`."""

    target: Recipe | str
    asked: CheckOptions
    _: KW_ONLY
    progress: Callable[[str], None] | None = None
    hosts: Leader | None = None
    wrap: Callable[[], WrappedModule] = calls.model_build.wrap  # phase that wraps the model
    make_world: Callable[..., World] = start_world
    reference: CheckState | None = None  # finished check of this target, whose single-process results are reused

    def __post_init__(self) -> None:
        self.state = CheckState(self.asked, RankParams(self.asked.rank_parameters))
        self._progress = PhaseProgress(self.progress)
        self._alone_in_group = self._packing_checked = self._large = False
        self._one_machine = self.hosts is None or self.hosts.one_machine
        self._earlier: list[Callable[[], None]] = [
            partial(calls.single_process.start, self.target, self.asked.seed, self.asked.world_size)
        ]

    def _start_worlds(self, stack: contextlib.ExitStack) -> None:
        with self.state.log.time_part("start"):
            self._progress(f"starting {self.asked.world_size} ranks")
            self.world = stack.enter_context(self._make_world(group=True))
            if self.reference is None:
                self.single = stack.enter_context(self._make_world(group=False))
            self._worlds = stack

    def _make_world(self, *, group: bool) -> World:
        if not group:
            return self.asked.single_process_world(make=self.make_world)
        mismatch = CollectiveMismatchWatch()

        def watch(world: World, finished: frozenset[int], running: frozenset[int]) -> str | None:
            self._progress.wait_for(running)
            return mismatch(world, finished, running)

        return self.asked.world(self.hosts, watch, make=self.make_world)

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
        """Run a phase that explains a fault; replace results of failed ranks by `otherwise`."""
        try:
            results = self.world.run(partial(calls.try_call, phase, *args, **kwargs))
        except errors.RankError as error:
            if not [result for result in error.results.values() if self.state.log.add_unexplained(what, result)]:
                raise
            self._skip_rest(f"the ranks could not continue after this failed: {what}")
        for result in results:
            self.state.log.add_unexplained(what, result)
        return [otherwise if isinstance(result, NoExplanation) else result for result in results]

    def _start_single(self, call: Callable[[], Result]) -> RunFuture[Result]:
        self._last_single = call
        return self.single.start(call)

    def _settle_single(self, pending: RunFuture[Result]) -> Result | None:
        """Return the result of the single process; on failure record the reason, return None."""
        try:
            return pending.result()[0]
        except errors.RankError as error:
            first = error.first
            if first is not None and isinstance(first.exception, errors.UsageError):
                raise
            message = str(first.message if first else error).removeprefix("rank 0 ")
            skipped = f"the single process {message}"
            if first is not None and first.bug:
                self.state.log.add_bug(ReportError(first.bug, errors.EXIT_USAGE, error.detail))
            elif first is not None and "silenced" in first.place:
                skipped = f"not comparable with constants in place of random numbers: {skipped}"
            elif isinstance(error, errors.HangError):
                text = str(error).removeprefix("rank 0 ").replace("rank 0", "it")
                skipped = self.state.single.hang = f"the single process {text}; a longer timeout gives it more time"
            elif not self._alone_in_group and any(pattern in message for pattern in _NO_GROUP):
                result: Result | None = self._retry_in_group()
                return result
            self.state.single.skipped = skipped
            return None

    def _retry_in_group(self) -> Any:
        self._alone_in_group = True
        self.state.log.notes.append(
            "the single process has a process group of one, since the model does not run without"
        )
        last_call = self._last_single
        self.single = self._worlds.enter_context(self._make_world(group=False))
        for call in (calls.single_process.join_single_process_group, *self._earlier):
            if self._settle_single(self._start_single(call)) is None and self.state.single.skipped:
                return None
        return None if last_call is self._earlier[-1] else self._settle_single(self._start_single(last_call))

    def _logs(self) -> list[list[Call]]:
        return [read_log(self.world.directory, rank) for rank in range(self.asked.world_size)]

    # Bookkeeping

    @contextlib.contextmanager
    def _phase(self, name: str, words: str) -> Iterator[None]:
        self._progress(f"{name}, {words}")
        with self.state.log.time_part(name):
            try:
                yield
            except errors.TargetError as error:
                self.state.log.error = ReportError(str(error), errors.EXIT_TARGET, error.detail)
                raise CheckStopped from error

    def _skip_rest(self, reason: str) -> NoReturn:
        self.state.log.rest_skipped = reason
        raise CheckStopped

    def _fail(self, error: errors.RankError) -> None:
        """Record why the ranks of a world failed, and why later phases were skipped."""
        first = error.first
        if first is not None and isinstance(first.exception, errors.UsageError):
            raise first.exception
        if first is not None and type(first.exception) is errors.DDPCheckError:  # a result that cannot be sent
            first = replace(first, bug=str(as_bug(first.exception, first.place)))
        if first is not None and first.bug:
            self.state.log.error = ReportError(f"rank {first.rank}: {first.bug}", errors.EXIT_USAGE, error.detail)
            return
        if empty := judge_empty_shards(error.failures, self.asked.world_size):
            self.state.add(empty)
            self.state.log.rest_skipped = f"{empty[0].code}: {error.first.exception}" if error.first else ""
            return
        facts = FailureFacts(error.failures, self._logs(), [*error.results])
        self.state.timelines = timelines_of_failure(facts)
        findings = judge_wrapper_failure(self.state, error) or diagnose(facts)
        if first is not None and isinstance(first.exception, errors.DDPCheckError):
            everywhere = len({f.rank for f in error.failures if f.kind == "raised"}) == self.asked.world_size
            self.state.add([] if everywhere else findings)
            prefix = "" if everywhere else f"rank {first.rank}: "
            output = f"what rank {first.rank} printed, its last lines:\n{first.output}" if first.output.strip() else ""
            detail = "\n".join(filter(None, (first.exception.detail, output)))
            self.state.log.error = ReportError(f"{prefix}{first.exception}", errors.EXIT_TARGET, detail)
        else:
            self.state.add(findings)
            is_hang = isinstance(error, errors.HangError) or any(mismatch_number(f) is not None for f in findings)
            self.state.log.error = ReportError(
                str(error), errors.EXIT_HANG if is_hang else errors.EXIT_TARGET, error.detail
            )

    def _add(self, findings: Sequence[Finding]) -> None:
        """Add findings; a finding without location gets the line that creates its first subject."""
        without_location = sorted({finding.subjects[0] for finding in findings if finding.location is None})
        by_rank: list[dict[str, Location]] = []
        try:
            by_rank = self._lines_of(without_location) if without_location else []
        finally:
            lines = {name: line for locations in reversed(by_rank) for name, line in locations.items()}
            self.state.add([replace(f, location=lines.get(f.subjects[0], f.location)) for f in findings])

    def _lines_of(self, names: Sequence[str]) -> list[dict[str, Location]]:
        return self._explained("which line made what", {}, calls.model_build.locations, names)

    def _locate_module(self) -> dict[str, Location]:
        module = (self.state.single.analysis.coupling.module if self.state.single.analysis else None) or ""
        if not module or self.world.failed or self.world.closed:
            return {}
        with contextlib.suppress(CheckStopped, errors.RankError):
            return self._lines_of([module])[0]
        return {}
