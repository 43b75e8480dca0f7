"""What the processes of the ranks of a run do now, as far as it can be seen from outside; on Linux.

A rank that waits uses no processor time under gloo. Under other backends its main thread may be busy all the time (it
spins), as if it worked. Such a rank waits if its own record says that it has not come out of a collective; or if it is
at a line that may block, and its collectives are known not to match those of the others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ddpcheck.findings.files import process_stat, read_file
from ddpcheck.findings.stacks import BACKWARD, Frame, pickles, region_of, waits_for_others, waits_for_result
from ddpcheck.record.rank.environment import STACK_SIGNAL
from ddpcheck.stream.held_file import HEAD_SIZE, is_held, is_inside
from ddpcheck.stream.rank_log import rank_processes, read_logs
from ddpcheck.worlds.deadlock import processor_seconds, status_value
from ddpcheck.worlds.waiting import ask_for_stacks

_SHARE = 0.02  # of a core that a rank may use while it waits
_FOR_STACKS = 1.0  # seconds
_QUIET = 0.05  # seconds without more of them
_NO_INTERPRETER = "Current thread, in which the interpreter has ended"


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What is known of a rank that has left no trace of progress for some time."""

    is_idle: bool  # whether its process has used next to no processor time
    spins: bool = False  # whether ranks may use it while they wait: not under gloo
    others_idle: bool = True  # whether the threads beside the main one have used next to none
    is_inside: bool = False  # whether its main thread is in a collective, or waits for one, by its record
    parted: bool = False  # whether what the ranks have called last is known not to match

    @property
    def may_wait(self) -> bool:
        """Whether it may wait for others, as far as is known without its stack."""
        return self.is_idle or (self.spins and (self.parted or (self.is_inside and self.others_idle)))

    def waits(self, stack: Sequence[Frame]) -> bool:
        """Whether it waits for others."""
        if not self.may_wait or not stack:
            return False
        if self.is_inside and not pickles(stack):
            return True
        if self.is_idle:
            return waits_for_others(stack)
        at_wait = waits_for_others(stack) or waits_for_result(stack) or region_of(stack) == BACKWARD
        return self.parted and at_wait and not pickles(stack)


class LivingRanks:
    """The processes of the ranks whose logs are in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def living(self) -> tuple[dict[int, int], bool]:
        """The processes of the ranks of the last start that live, by rank; and whether none is somewhere else.

        One that has left no log has not begun, or is on another machine, where it may be at work.
        """
        ranks, world_size = self.joined()
        return {rank: pid for rank, pid in ranks.items() if lives(pid)}, len(ranks) >= world_size

    def joined(self) -> tuple[dict[int, int], int]:
        """The processes of the ranks of the last start that have joined the process group, and its size."""
        sizes = [int(path.stem.split("-")[2]) for path in self._folder.glob("*-*-*-*.log")]
        return rank_processes(self._folder), max(sizes, default=1)

    def facts(
        self, ranks: dict[int, int], before: dict[int, Used], seconds: float, *, parted: bool = False
    ) -> dict[int, RankFacts]:
        """What is known of the ranks, whose use of the processor was that `before` so many seconds."""
        spinning = {log.started.rank for log in read_logs(self._folder) if log.started.backend != "gloo"}
        facts = {}
        for rank, pid in ranks.items():
            earlier = before.get(pid, Used(0.0, 0.0))
            spins = rank in spinning
            facts[rank] = RankFacts(
                is_idle(earlier.whole, processor_seconds(pid), seconds),
                spins,
                spins and is_idle(earlier.beside_main, processor_seconds(pid, beside_main=True), seconds),
                is_inside(next(self._folder.glob(f"*-{rank}-*-{pid}.calls"))),
                parted,
            )
        return facts

    def progress(self) -> dict[str, bytes]:
        """What changes as long as a rank gets on, by file: steps, batches, collectives and their ends, entries."""
        found = {}
        for path in sorted(self._folder.glob("*.*")):
            if path.suffix == ".log":
                found[path.name] = str(path.stat().st_size).encode()
            elif path.suffix in (".steps", ".batches", ".calls"):
                found[path.name] = read_file(path, HEAD_SIZE if path.suffix == ".calls" else 256, head=True)
        return found

    def stacks(self, ranks: dict[int, int]) -> dict[int, str]:
        """The stacks of those ranks that can write them."""
        files = {rank: next(self._folder.glob(f"*-{rank}-*-{pid}.stack")) for rank, pid in ranks.items()}
        asked = {rank: pid for rank, pid in ranks.items() if _catches_signal(pid) and is_held(files[rank], pid)}

        def ask() -> None:
            for pid in asked.values():  # another one would end at the signal, or write into a file of the script
                os.kill(pid, STACK_SIGNAL)

        ask_for_stacks([files[rank] for rank in asked], ask, _FOR_STACKS, _QUIET)
        stacks = {rank: read_file(files[rank]).decode("utf-8", "replace") for rank in asked}
        return {rank: _NO_INTERPRETER for rank, pid in ranks.items() if not _catches_signal(pid)} | stacks


def lives(pid: int) -> bool:
    """Detect a process that has not ended; one has, if its parent alone has not asked for it yet. On Linux."""
    return process_stat(pid)[:1] not in ([], ["Z"])


def is_stopped(pid: int) -> bool:
    """Detect a process that was stopped by a signal, and waits to be continued. On Linux."""
    return process_stat(pid)[:1] == ["T"]


class Used(NamedTuple):
    """The processor seconds that a rank has used: of its process, and of the threads beside its main one."""

    whole: float
    beside_main: float


def used(ranks: dict[int, int]) -> dict[int, Used]:
    """What the processes of ranks have used up to now, by process."""
    return {
        pid: Used(processor_seconds(pid) or 0.0, processor_seconds(pid, beside_main=True) or 0.0)
        for pid in ranks.values()
    }


def is_idle(before: float, now: float | None, seconds: float) -> bool:
    """Whether a process or thread has used next to no processor time in some seconds; `None` for one that runs."""
    return now is not None and now - before <= 0.1 + _SHARE * seconds


def _catches_signal(pid: int) -> bool:
    """Whether a process still writes its stack when it is asked to: an interpreter that has ended does not."""
    return bool(int(status_value(str(pid), "SigCgt") or "0", 16) >> (STACK_SIGNAL - 1) & 1)
