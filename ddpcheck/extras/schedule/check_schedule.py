"""`check_schedule(recipe)`: simulate many ranks one by one and compare their collectives.

Each rank trains in a process group without the other ranks. Detects mismatches that depend on the rank, the world size
or the process groups, but not mismatches that depend on values computed by other ranks.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ddpcheck.extras import calls
from ddpcheck.findings.errors import EXIT_HANG, EXIT_TARGET, EXIT_USAGE, DDPCheckError, HangError, RankError, UsageError
from ddpcheck.findings.evidence.endings import ScheduledCall, Simulated, SimulatedRank
from ddpcheck.findings.report import CheckResult, Finding, Report, ReportError
from ddpcheck.findings.selection import Suppression
from ddpcheck.findings.wording import join_names, plural, suggests_names
from ddpcheck.report.checking.check import resolve_options
from ddpcheck.report.checking.check_report import make_report
from ddpcheck.report.checking.check_state import CheckOptions
from ddpcheck.rules.collectives.first_divergence import judge_schedules
from ddpcheck.rules.verdict import Verdict, status_of
from ddpcheck.worlds.validation import check_count

if TYPE_CHECKING:
    from ddpcheck.recipe.recipe import Recipe

MOST_RANKS = 65_536
_MOST_AT_ONCE = 8
_MOST_ROUNDS = 6
_MOST_NAMED = 6  # operations named in a check line

Result = TypeVar("Result")


@suggests_names("check_schedule")
def check_schedule(
    target: Recipe | str,
    *,
    world_size: int = 1024,
    steps: int = 3,
    timeout: float = 30.0,
    seed: int = 0,
    preload: Sequence[str] = (),
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    suppress: Sequence[Suppression] = (),
    baseline: Report | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Simulate every rank of a world separately on CPU; compare the collectives.

    Args:
        target: A `Recipe`, or a TARGET ("path/to/file.py:attr"), which only the simulated ranks load.
        world_size: Number of ranks; each is a short-lived process, with a few at a time.
        steps: Training steps of each rank.
        timeout: Seconds after which a rank counts as hung.
        seed: Seed of all random number generators.
        preload: Modules to import once, before forking ranks; see `World`.
        select: Codes, prefixes or names of the rules to report; default: all.
        ignore: Codes, prefixes or names of the rules not to report.
        suppress: Findings that are shown with a reason, and do not count.
        baseline: An earlier report; findings in both are shown as known and do not count.
        progress: Called with a progress message, such as "8 of 1024 ranks".

    Returns:
        The report. If a rank fails or hangs, `Report.error` is set and no further ranks are simulated.

    Raises:
        UsageError: An argument is invalid, or `target` is not a recipe.
    """
    check_count("world_size", world_size, MOST_RANKS)
    options = CheckOptions(
        world_size=world_size,
        backend="simulated",
        steps=steps,
        timeout=timeout,
        seed=seed,
        preload=(*calls.MODULES, *preload),
        select=select,
        ignore=ignore,
        suppress=suppress,
        baseline=baseline,
    )
    simulation = _Simulation(target, resolve_options(options, target), progress or (lambda _words: None))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ddpcheck-", ignore_cleanup_errors=True) as folder:
        simulation.run(Path(folder))
    return simulation.report(time.perf_counter() - start)


class _Simulation:
    def __init__(self, target: Recipe | str, asked: CheckOptions, progress: Callable[[str], None]) -> None:
        self.target, self.asked, self.progress = target, asked, progress
        self.ranks: list[SimulatedRank] = []
        self.schedules: dict[str, list[ScheduledCall]] = {}
        self.findings: list[Finding] = []
        self.error: ReportError | None = None
        self.shards = 0
        self.is_changing = False  # True if the collectives still change in each round

    def run(self, folder: Path) -> None:
        """Repeat simulating all ranks until a rank fails or the exchanged data stops changing."""
        asked = self.asked
        count = partial(calls.schedule_phases.count_shards, self.target, asked.seed, asked.world_size)
        self.shards = sum(self._on_ranks([0], lambda _rank: count))
        simulated = Simulated(asked.world_size, asked.steps, self.shards, folder)
        sent, digests = [""], [""]
        for _ in range(_MOST_ROUNDS):
            last_digests, digests = digests, self._simulate_ranks(simulated)
            last_sent, sent = sent, self._on_ranks([0], lambda _rank: partial(calls.schedule_phases.combine, simulated))
            if self.error is not None:
                return
            if sent == last_sent:
                break
        self.is_changing = sent != last_sent and digests != last_digests  # trained values may change sent data alone
        self.findings = [] if self.is_changing else judge_schedules(self.schedules, digests)

    def _simulate_ranks(self, simulated: Simulated) -> list[str]:
        """Simulate all ranks once; return the digest of the collectives of each rank."""
        size, at_once = simulated.world_size, min(_MOST_AT_ONCE, os.cpu_count() or 1)
        self.ranks = []
        while self.error is None and len(self.ranks) < size:
            self.progress(f"{len(self.ranks)} of {plural(size, 'rank')}")
            # rank 0 first and alone, since other ranks receive the data that rank 0 sends as root
            ranks = range(len(self.ranks), min(size, len(self.ranks) + at_once) if self.ranks else 1)
            self.ranks += self._on_ranks(
                ranks,
                lambda rank: partial(calls.schedule_phases.simulate, self.target, self.asked.seed, rank, simulated),
            )
        names = [rank.schedule for rank in self.ranks]
        decoded = partial(msgspec.msgpack.decode, type=list[ScheduledCall])
        self.schedules = {name: decoded((simulated.folder / f"schedule-{name}").read_bytes()) for name in set(names)}
        return names

    def _on_ranks(self, ranks: Sequence[int], phase: Callable[[int], Callable[[], Result]]) -> list[Result]:
        """Run a phase in a separate process per rank; set `error` on failure."""
        if self.error is not None:
            return []
        with contextlib.ExitStack() as stack:
            worlds = [stack.enter_context(self.asked.single_process_world(threads=1)) for _ in ranks]
            pending = [world.start(phase(rank)) for rank, world in zip(ranks, worlds, strict=True)]
            results = []
            for rank, future in zip(ranks, pending, strict=True):
                try:
                    results += future.result()
                except RankError as error:
                    self.error = _error_of(error, rank)
                    break
        return results

    def report(self, seconds: float) -> Report:
        status_pairs = {"collectives": [(finding, finding) for finding in self.findings]}
        simulated = f"{len(self.ranks):,} ranks simulated one by one, {plural(self.asked.steps, 'step')} each"
        verdicts = {"ranks": Verdict(matching=simulated), "collectives": self._collectives_verdict()}

        def lines(kept: Sequence[Finding]) -> Iterator[CheckResult]:
            for name, verdict in verdicts.items():
                status, detail = status_of(verdict, status_pairs.get(name, []), kept)
                if name == "ranks" and self.error is not None:
                    status, detail = "error", self.error.message
                yield CheckResult(name, status, 0.0, detail)

        timing = {"total": round(seconds, 4)}
        return make_report(self.asked, self.findings, lines, notes=self._notes(), timing=timing, error=self.error)

    def _collectives_verdict(self) -> Verdict:
        if self.error is not None:
            return Verdict(lacking="not reached")
        if self.is_changing:
            changes = "the calls of ranks still change with the data that others send"
            return Verdict(lacking=f"not known: {changes}, after {_MOST_ROUNDS} rounds")
        counts = [Counter(entry.call.operation for entry in schedule) for schedule in self.schedules.values()]
        sums = sorted({sum(count.values()) for count in counts})
        number = str(sums[0]) if len(sums) == 1 else f"{sums[0]} to {sums[-1]}"
        if not sums[-1]:
            return Verdict(lacking="no rank made a collective")
        operations = max(counts, key=lambda count: sum(count.values())).most_common()
        words = [f"{times} {operation}" for operation, times in operations]
        return Verdict(matching=f"{number} of each rank, which pair up: {join_names(words, most=_MOST_NAMED)}")

    def _notes(self) -> list[str]:
        notes = [
            "each rank ran alone: a collective gave it the data of the root and small tensors of the others, and its "
            "own data in place of large ones; send and recv are not followed"
        ]
        if 0 < self.shards < self.asked.world_size:
            parts = (
                "one half of it on even ranks, the other on odd ones" if self.shards > 1 else "all of it on each rank"
            )
            notes.append(f"the batch has fewer samples than there are ranks: {parts}")
        return notes


def _error_of(error: RankError, rank: int) -> ReportError:
    first = error.first
    if first is not None and isinstance(first.exception, UsageError):
        raise first.exception
    if first is not None and first.bug:
        return ReportError(f"simulated rank {rank}: {first.bug}", EXIT_USAGE, error.detail)
    message = str(error if first is None else first.message).removeprefix("rank 0 ")
    detail, code = error.detail.replace("[rank 0]", f"[rank {rank}]"), EXIT_TARGET
    if isinstance(error, HangError):
        message, code = f"has not ended in time: it {message}", EXIT_HANG
    elif first is not None and isinstance(first.exception, DDPCheckError):
        message, detail = f"failed: {first.exception}", first.exception.detail
    return ReportError(f"simulated rank {rank} {message}", code, detail)
