"""Watches from outside whether the ranks of a script get on, and ends it when all that live cannot.

They wait for each other, or have run all of the script and do not end: a deadlock of torch's, which needs no ddpcheck.
Where a `DistributedDataParallel` is freed after `destroy_process_group()`, its reducer has the last reference to the
group. ~ProcessGroupGloo joins the group's threads, while Python has the GIL (`Reducer` is bound without releasing it);
a thread that has yet to free its last work waits for the GIL, since the thread-local state in a work refers to Python.
Seen in 1 of 50 short scripts without ddpcheck. To wait a moment before the group is destroyed avoids it (`rank_watch`).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from ddpcheck.findings.evidence.endings import Joining
from ddpcheck.findings.stacks import (
    WORKERS,
    has_no_python_left,
    lock_waited_for,
    own_stack,
    program_threads,
    region_of,
    waits_for_others,
)
from ddpcheck.findings.wording import agreeing, format_ranks
from ddpcheck.judge.endings.collective_order import judge_collectives
from ddpcheck.run.living_ranks import LivingRanks, RankFacts, Used, is_idle, is_stopped, lives, used
from ddpcheck.run.meeting_watch import MeetingWatch
from ddpcheck.run.node_link import NodeLink, Standing
from ddpcheck.stream.entries import RankRaised
from ddpcheck.stream.rank_log import comparable_logs, rank_processes, read_logs
from ddpcheck.worlds import failures
from ddpcheck.worlds.deadlock import gloo_wants_gil, locked_children, processor_seconds, switches

_INTERVAL = 0.5  # seconds between two looks
_FOR_STACKS = 1.0  # seconds
_GRACE = 3.0  # seconds that a rank has to end after it was told to
_LOCKED = 5.0  # seconds in which a locked process has not woken up
_MISMATCH = 5.0  # seconds without progress, where collectives are known not to match
_FOR_NODES = 1.0  # seconds in which other nodes hear that all ranks are to be ended


@dataclass(frozen=True, slots=True)
class Hang:
    """Ranks that have not got on; `stacks` of those that live, by rank."""

    seconds: float
    stacks: dict[int, str]
    joining: tuple[Joining, ...] = ()  # where they are in `init_process_group`, and have left no log yet


@dataclass(frozen=True, slots=True)
class Unended:
    """Ranks that have run all of the script, and whose processes have not ended."""

    seconds: float
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Stuck:
    """The ranks of this node, each of which waits in vain unless a rank of another node gets on."""

    hang: Hang
    sizes: dict[str, int]  # of their files, by name


class HangWatch:
    """A thread that looks at the logs of the ranks; on Linux, where it can see whether a rank works.

    Attributes:
        hang: What was seen when the ranks waited for each other.
        unended: What was seen when all that lived had run all of the script, and did not end.
    """

    def __init__(
        self,
        folder: Path,
        timeout: float,
        end: Callable[[], object],
        tell: Callable[[str], object] | None = None,
        nodes: NodeLink | None = None,
        limit: float = math.inf,
    ) -> None:
        """Begin.

        Args:
            folder: Of the logs.
            timeout: Seconds.
            end: Called once the ranks that live have not got on for so long, and cannot.
            tell: Takes a sentence on a rank that has failed, where torchrun has to wait for the others.
            nodes: The other nodes, if their ranks are watched as well.
            limit: Seconds after which ranks are ended in any case.
        """
        self.hang: Hang | None = None
        self.unended: Unended | None = None
        self._folder = folder
        self._ranks = LivingRanks(folder)
        self._timeout = timeout
        self._limit = limit
        self._end = end
        self._tell = tell or (lambda sentence: None)
        self._nodes = nodes
        self._stuck: _Stuck | None = None
        self._told_raised = self._told_stopped = False
        self._failed_since = 0.0
        self._over = threading.Event()
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._look, name="ddpcheck-hang-watch", daemon=True)
        if sys.platform == "linux":
            self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        with self._ending:
            self._over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_FOR_STACKS + 2 * _INTERVAL)

    def _look(self) -> None:
        seen: dict[str, bytes] = {}
        meeting = MeetingWatch(self._folder)
        progress, since, before, is_stuck = 0.0, 0.0, dict[int, Used](), False
        latest = time.monotonic() + self._limit
        while not self._over.wait(_INTERVAL):
            try:
                ranks, are_all_here = self._ranks.living()
                self._tell_what_raised(ranks)
                now, last = time.monotonic(), seen
                seen = self._ranks.progress()
                if not ranks or seen != last:
                    progress, since, before, is_stuck = now, now, used(ranks), False
                elif is_stuck and not all(
                    one.may_wait for one in self._ranks.facts(ranks, before, now - since).values()
                ):
                    since, before, is_stuck = now, used(ranks), False
                elif now - since >= self._timeout or (
                    now - since >= _MISMATCH and are_all_here and self._do_not_match(ranks)
                ):
                    is_late = now - progress >= self._timeout
                    parted = is_late and are_all_here and self._part_now(ranks)
                    facts = self._ranks.facts(ranks, before, now - since, parted=parted)
                    is_stuck = self._cannot_get_on(ranks, facts, now - progress, are_all_here)
                    self._tell_what_is_stopped(ranks)
                    since, before = now, used(ranks)
                if not ranks and (waiting := meeting.in_vain(now, self._timeout)):
                    self.hang = Hang(self._timeout, {}, waiting)
                    ranks = {place: one.pid for place, one in enumerate(waiting)}
                if now >= latest and self.hang is None:
                    self.hang = Hang(self._limit, self._ranks.stacks(ranks))
                if self.hang or self.unended or self._nodes_must_end(ranks, is_stuck=is_stuck):
                    self._tell_why_it_ends(ranks)
                    self._end_ranks(ranks)
                    return
            except OSError:  # a rank has just ended
                seen = {}

    def _tell_what_raised(self, living: dict[int, int]) -> None:
        """Say once what a rank has raised, where others do not end at SIGTERM: torchrun waits 30 seconds for them."""
        if self._told_raised or not living or living.keys() == rank_processes(self._folder).keys():
            self._failed_since = 0.0
        elif not self._failed_since:
            self._failed_since = time.monotonic()
        elif time.monotonic() - self._failed_since >= _GRACE:
            self._told_raised = True
            gone = [log for log in read_logs(self._folder) if log.started.rank not in living]
            raised = [(log.started.rank, one) for log in gone for one in log.entries if isinstance(one, RankRaised)]
            for rank, entry in raised[:1]:
                failure = failures.raised(rank, dict(entry.reply))
                where = f" at {failure.location}" if failure.location else ""
                self._tell(f"{failure.message}{where}; torchrun waits for {format_ranks(living)} to end")

    def _tell_what_is_stopped(self, living: dict[int, int]) -> None:
        """Say once which rank was stopped by a signal: it may go on, so that this is no hang."""
        stopped = {rank: pid for rank, pid in living.items() if is_stopped(pid)}
        if self._told_stopped or not stopped:
            return
        self._told_stopped = True
        pids = " ".join(map(str, stopped.values()))
        self._tell(
            f"{format_ranks(stopped)} {agreeing('was', [*stopped])} stopped by a signal; `kill -CONT {pids}` ends that"
        )

    def _tell_why_it_ends(self, living: Collection[int]) -> None:
        """Say why the script is ended, before its launcher says that it was sent a signal."""
        why = "all ranks wait for each other"
        if self.unended is not None:
            why = f"{format_ranks(living)} {agreeing('has', [*living])} run to the end of the script, and not ended"
        elif len(living) == 1:
            why = f"{format_ranks(living)} waits for a rank that does not arrive"
        self._tell(f"{why}; ending the script")

    def _cannot_get_on(
        self, ranks: dict[int, int], facts: dict[int, RankFacts], seconds: float, are_all_here: bool
    ) -> bool:
        """Whether each of the ranks waits for others in vain, or cannot end; says so in `self`.

        Where some are on other nodes, these may get on.
        """
        if not all(one.may_wait for one in facts.values()):
            return False
        stacks = self._ranks.stacks(ranks)
        logs = {log.started.rank: log for log in read_logs(self._folder)}
        unended = {
            rank
            for rank, pid in ranks.items()
            if facts[rank].is_idle
            and logs[rank].has_left
            and ((logs[rank].has_ended and has_no_python_left(stacks.get(rank, ""))) or gloo_wants_gil(pid))
        }
        waiting = {rank: stacks.get(rank, "") for rank in ranks if rank not in unended}
        elsewhere = [rank for rank, stack in waiting.items() if not facts[rank].waits(own_stack(stack))]
        for rank in elsewhere:
            by_thread = self._waits_for_threads(ranks[rank], waiting[rank], has_lost_one=bool(logs[rank].thread_errors))
            if not by_thread and not self._waits_for_locked_worker(ranks[rank], waiting[rank]):
                return False  # a slow read of a file is no hang
        if not waiting:
            self.unended = Unended(seconds, tuple(sorted(unended)))
        elif are_all_here:
            self.hang = Hang(seconds, waiting)
        elif self._nodes is not None and self._nodes.is_joined:
            sizes = {path.name: path.stat().st_size for path in self._folder.glob("*-*.*")}
            self._stuck = _Stuck(Hang(seconds, waiting), sizes)
        else:
            return False
        return True

    def _nodes_must_end(self, living: dict[int, int], *, is_stuck: bool) -> bool:
        """Say how the ranks of this node stand; whether no rank of the job gets on, as the first node decides."""
        if self._nodes is None or not self._nodes.is_joined:
            return False
        ranks, world_size = self._ranks.joined()
        standing: Standing = "stuck" if is_stuck else "on" if living or not ranks else "ended"
        self._nodes.stands(standing, tuple(ranks), world_size)
        if not self._nodes.must_end():
            return False
        if self._nodes.number == 0:  # the ranks of the others would fail with those of this node
            self._over.wait(_FOR_NODES)
        self.hang = Hang(0.0, {}) if self._stuck is None else self._stuck.hang
        return True

    def forget_end(self) -> None:
        """Of ranks that waited for other nodes forget what they have left since: they may have failed with those."""
        if self._stuck is None or self.hang is not self._stuck.hang:
            return
        for path in self._folder.glob("*-*.*"):
            size = self._stuck.sizes.get(path.name)
            if size is None:
                path.unlink()
            elif path.suffix == ".log":
                os.truncate(path, size)

    def _waits_for_locked_worker(self, pid: int, stack: str) -> bool:
        """Whether a rank waits for a worker of its data loader that waits for a lock, and has not woken up."""
        if region_of(own_stack(stack)) != WORKERS:
            return False
        before = locked_children(pid)
        self._over.wait(_LOCKED if before else 0.0)
        return bool(before.items() & locked_children(pid).items())

    def _waits_for_threads(self, pid: int, stack: str, *, has_lost_one: bool) -> bool:
        """Whether the main thread of a rank waits for its other threads, has not woken up, and each of them waits.

        One of them waits for other ranks, or an exception has ended one (`has_lost_one`).
        """
        others = program_threads(stack)
        if not lock_waited_for(own_stack(stack)) or not (has_lost_one or any(map(waits_for_others, others))):
            return False
        if not all(waits_for_others(other) or lock_waited_for(other) for other in others):
            return False
        before = switches(f"{pid}/task/{pid}")
        self._over.wait(_LOCKED)
        return switches(f"{pid}/task/{pid}") == before

    def _end_ranks(self, ranks: dict[int, int]) -> None:
        """End them; those that do not heed it, and do not work either, are killed. A handler in Python needs a rank
        that comes back from C++, which these cannot; torchrun would wait 30 seconds for it.
        """
        with self._ending:
            if self._over.is_set():
                return
            self._end()
        while living := {rank: pid for rank, pid in ranks.items() if lives(pid)}:
            before = {pid: processor_seconds(pid) for pid in living.values()}
            if is_over := self._over.wait(_GRACE):  # who has started these has ended before them
                time.sleep(_INTERVAL)
            for pid in living.values():
                if lives(pid) and is_idle(before[pid] or 0.0, processor_seconds(pid), _GRACE):
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
            if is_over:
                return

    def _do_not_match(self, living: Collection[int]) -> bool:
        """Whether ranks have come to collectives that do not match: waiting longer would not help."""
        return bool(judge_collectives(comparable_logs(read_logs(self._folder)), living))

    def _part_now(self, living: Collection[int]) -> bool:
        """Whether a rank has come no further than to where collectives do not match: else they may have paired up."""
        logs = comparable_logs(read_logs(self._folder))
        before = [log[:-1] if rank in living else log for rank, log in enumerate(logs)]
        return bool(judge_collectives(logs, living)) and not judge_collectives(before, living)


def end_agent() -> None:
    """Have torchrun's agent, which this process is, end the ranks."""
    os.kill(os.getpid(), signal.SIGTERM)
