"""Detect ranks that wait for each other, or do not exit after the script.

The latter is a deadlock in torch: if a `DistributedDataParallel` is freed after `destroy_process_group()`, its reducer
holds the last reference to the group. ~ProcessGroupGloo joins the threads of the group while holding the GIL (`Reducer`
is bound without releasing it); a thread that frees its last work waits for the GIL, since the thread-local state in a
work refers to Python objects. Seen in 1 of 50 short scripts without ddpcheck; `rank_watch` avoids it by a short wait.
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

import msgspec

from ddpcheck.findings.evidence.endings import Joining
from ddpcheck.findings.stacks import (
    WORKERS,
    has_no_python_frames,
    lock_waited_for,
    main_stack,
    program_threads,
    region_of,
    waits_for_ranks,
)
from ddpcheck.findings.wording import format_ranks, pluralize_verb
from ddpcheck.record.rank.started_processes import RAISED, SUFFIX
from ddpcheck.rules.collectives.ddp403_collective_mismatch import judge_collectives
from ddpcheck.run import live_ranks
from ddpcheck.run.live_ranks import LiveRanks, ProcessorTimes, RankFacts
from ddpcheck.run.node_link import NodeLink, Standing
from ddpcheck.stream.entries import RankRaised
from ddpcheck.stream.rank_log import comparable_logs, rank_processes, read_logs
from ddpcheck.trace.script_facts import entries_of
from ddpcheck.worlds import failures
from ddpcheck.worlds.deadlock import processor_seconds

_INTERVAL = 0.5  # seconds between two polls
_STACK_TIMEOUT = 1.0  # seconds to wait for stack dumps
_GRACE = 3.0  # seconds for a rank to exit after SIGTERM
_LOCKED = 5.0  # seconds without a context switch after which a process that waits for a lock is deadlocked
_MISMATCH_TIMEOUT = 5.0  # seconds without progress after which ranks count as hung, if collectives mismatch
_NODE_DELAY = 1.0  # seconds for other nodes to receive the order to end their ranks


@dataclass(frozen=True, slots=True)
class Hang:
    """Hang of ranks: `seconds` without progress, and `stacks` of live ranks, by rank."""

    seconds: float
    stacks: dict[int, str]
    joining: tuple[Joining, ...] = ()  # processes in `init_process_group`, without a log yet


@dataclass(frozen=True, slots=True)
class NotExited:
    """Ranks that finished the script but whose processes did not exit."""

    seconds: float
    ranks: tuple[int, ...]


class HangWatch:
    """Thread that detects hangs from the ranks' logs and processor times; on Linux only.

    Attributes:
        hang: Ranks that wait for each other, or None.
        not_exited: Ranks that finished the script but did not exit, or None.
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
        """Start the thread.

        Args:
            folder: Log folder.
            timeout: Seconds without progress after which ranks count as hung.
            end: Called once if the ranks are hung; ends the script.
            tell: Called with messages: why the script is ended, or that torchrun waits after a rank has failed.
            nodes: Link to the other nodes, if their ranks are watched as well.
            limit: Seconds after which the ranks are ended in any case.
        """
        self.hang: Hang | None = None
        self.not_exited: NotExited | None = None
        self._folder = folder
        self._ranks = LiveRanks(folder)
        self._timeout = timeout
        self._limit = limit
        self._end = end
        self._report = tell or (lambda sentence: None)
        self._nodes = nodes
        self._stuck: Hang | None = None  # of all ranks of this node, pending the ranks of other nodes
        self._log_sizes: dict[str, int] = {}  # bytes of each log file at that time, by file name
        self._has_reported_raised = self._has_reported_stopped = False
        self._failed_since = 0.0
        self._stopped = threading.Event()
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._poll, name="ddpcheck-hang-watch", daemon=True)
        if sys.platform == "linux":
            self._thread.start()

    def stop(self) -> None:
        with self._ending:
            self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_STACK_TIMEOUT + 2 * _INTERVAL)

    def _poll(self) -> None:
        seen: dict[str, bytes] = {}
        rendezvous = _RendezvousWatch(self._folder)
        progress, since, before, is_stuck = 0.0, 0.0, dict[int, ProcessorTimes](), False
        latest = time.monotonic() + self._limit
        while not self._stopped.wait(_INTERVAL):
            try:
                ranks, are_all_here = self._ranks.live_pids()
                self._report_raised(ranks)
                now, last = time.monotonic(), seen
                seen = self._ranks.progress()
                if not ranks or seen != last:
                    progress, since, before, is_stuck = now, now, live_ranks.processor_times(ranks), False
                elif is_stuck and not all(
                    state.may_wait for state in self._ranks.facts(ranks, before, now - since).values()
                ):
                    since, before, is_stuck = now, live_ranks.processor_times(ranks), False
                elif now - since >= self._timeout or (
                    now - since >= _MISMATCH_TIMEOUT
                    and are_all_here
                    and judge_collectives(comparable_logs(read_logs(self._folder)), ranks)
                ):
                    is_late = now - progress >= self._timeout
                    diverged = is_late and are_all_here and self._diverge_now(ranks)
                    facts = self._ranks.facts(ranks, before, now - since, diverged=diverged)
                    is_stuck = self._are_hung(ranks, facts, now - progress, are_all_here)
                    self._report_stopped(ranks)
                    since, before = now, live_ranks.processor_times(ranks)
                if not ranks and (waiting := rendezvous.waiting_in_vain(now, self._timeout)):
                    self.hang = Hang(self._timeout, {}, waiting)
                    ranks = {index: joining.pid for index, joining in enumerate(waiting)}
                if now >= latest and self.hang is None:
                    self.hang = Hang(self._limit, self._ranks.stacks(ranks))
                if self.hang or self.not_exited or self._nodes_must_end(ranks, is_stuck=is_stuck):
                    self._report_end(ranks)
                    self._end_ranks(ranks)
                    return
            except OSError:  # a rank has just exited
                seen = {}

    def _report_raised(self, living: dict[int, int]) -> None:
        """Report a rank's exception once, if torchrun waits (30 s) for the other ranks."""
        if self._has_reported_raised or not living or living.keys() == rank_processes(self._folder).keys():
            self._failed_since = 0.0
        elif not self._failed_since:
            self._failed_since = time.monotonic()
        elif time.monotonic() - self._failed_since >= _GRACE:
            self._has_reported_raised = True
            logs = [log for log in read_logs(self._folder) if log.started.rank not in living]
            raised = [(log.started.rank, item) for log in logs for item in entries_of(log, RankRaised)]
            for rank, entry in raised[:1]:
                failure = failures.failure_of_exception(rank, dict(entry.reply))
                where = f" at {failure.location}" if failure.location else ""
                self._report(f"{failure.message}{where}; torchrun waits for {format_ranks(living)} to end")

    def _report_stopped(self, living: dict[int, int]) -> None:
        stopped = {rank: pid for rank, pid in living.items() if live_ranks.is_stopped(pid)}
        if stopped and not self._has_reported_stopped:
            self._has_reported_stopped = True
            who = f"{format_ranks(stopped)} {pluralize_verb('was', [*stopped])}"
            pids = " ".join(map(str, stopped.values()))
            self._report(f"{who} stopped by a signal; `kill -CONT {pids}` ends that")

    def _report_end(self, living: Collection[int]) -> None:
        why = "all ranks wait for each other"
        if self.not_exited is not None:
            why = (
                f"{format_ranks(living)} {pluralize_verb('has', [*living])} run to the end of the script, and not ended"
            )
        elif len(living) == 1:
            why = f"{format_ranks(living)} waits for a rank that does not arrive"
        self._report(f"{why}; ending the script")

    def _are_hung(self, ranks: dict[int, int], facts: dict[int, RankFacts], seconds: float, are_all_here: bool) -> bool:
        """Return True if the ranks hang, and store the `Hang` or `NotExited` in `self`."""
        if not all(state.may_wait for state in facts.values()):
            return False
        stacks = self._ranks.stacks(ranks)
        logs = {log.started.rank: log for log in read_logs(self._folder)}
        unended = {
            rank
            for rank, pid in ranks.items()
            if facts[rank].is_idle
            and logs[rank].has_left
            and (
                (logs[rank].has_ended and has_no_python_frames(stacks.get(rank, ""))) or live_ranks.gloo_wants_gil(pid)
            )
        }
        waiting = {rank: stacks.get(rank, "") for rank in ranks if rank not in unended}
        elsewhere = [rank for rank, stack in waiting.items() if not facts[rank].waits(main_stack(stack))]
        for rank in elsewhere:
            has_thread_error = bool(logs[rank].thread_errors)
            by_thread = self._waits_for_threads(ranks[rank], waiting[rank], has_thread_error=has_thread_error)
            if not by_thread and not self._waits_for_locked_worker(ranks[rank], waiting[rank]):
                return False  # a slow read of a file is no hang
        if not waiting:
            self.not_exited = NotExited(seconds, tuple(sorted(unended)))
        elif are_all_here:
            self.hang = Hang(seconds, waiting)
        elif self._nodes is not None and self._nodes.is_joined:
            self._log_sizes = {path.name: path.stat().st_size for path in self._folder.glob("*-*.*")}
            self._stuck = Hang(seconds, waiting)
        else:
            return False
        return True

    def _nodes_must_end(self, living: dict[int, int], *, is_stuck: bool) -> bool:
        """Publish this node's state; return True if the job hangs and must end."""
        if self._nodes is None or not self._nodes.is_joined:
            return False
        ranks, world_size = self._ranks.joined()
        standing: Standing = "stuck" if is_stuck else "on" if living or not ranks else "ended"
        self._nodes.publish_state(standing, tuple(ranks), world_size)
        if not self._nodes.must_end():
            return False
        if self._nodes.number == 0:  # ending rank 0 first would make the other nodes fail
            self._stopped.wait(_NODE_DELAY)
        self.hang = self._stuck or Hang(0.0, {})
        return True

    def forget_end(self) -> None:
        """Discard what ranks logged after the hang, because other nodes ended their ranks."""
        if self._stuck is None or self.hang is not self._stuck:
            return
        for path in self._folder.glob("*-*.*"):
            size = self._log_sizes.get(path.name)
            if size is None:
                path.unlink()
            elif path.suffix == ".log":
                os.truncate(path, size)

    def _waits_for_locked_worker(self, pid: int, stack: str) -> bool:
        if region_of(main_stack(stack)) != WORKERS:
            return False
        locked = live_ranks.locked_children(pid)
        self._stopped.wait(_LOCKED if locked else 0.0)
        return bool(locked.items() & live_ranks.locked_children(pid).items())

    def _waits_for_threads(self, pid: int, stack: str, *, has_thread_error: bool) -> bool:
        """Return True if the main thread waits for failed threads, or threads awaiting ranks."""
        threads = program_threads(stack)
        if not lock_waited_for(main_stack(stack)) or not (has_thread_error or any(map(waits_for_ranks, threads))):
            return False
        if not all(waits_for_ranks(thread) or lock_waited_for(thread) for thread in threads):
            return False
        before = live_ranks.context_switches(f"{pid}/task/{pid}")
        self._stopped.wait(_LOCKED)
        return live_ranks.context_switches(f"{pid}/task/{pid}") == before

    def _end_ranks(self, ranks: dict[int, int]) -> None:
        """End the ranks; kill ranks blocked in C++, which never handle SIGTERM."""
        with self._ending:
            if self._stopped.is_set():
                return
            self._end()
        while living := {rank: pid for rank, pid in ranks.items() if live_ranks.is_alive(pid)}:
            before = {pid: processor_seconds(pid) for pid in living.values()}
            if is_over := self._stopped.wait(_GRACE):  # the launcher ended before the ranks
                time.sleep(_INTERVAL)
            for pid in living.values():
                if live_ranks.is_alive(pid) and live_ranks.is_idle(before[pid] or 0.0, processor_seconds(pid), _GRACE):
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
            if is_over:
                return

    def _diverge_now(self, living: Collection[int]) -> bool:
        """Return True if the last collectives of live ranks are the first that mismatch."""
        logs = comparable_logs(read_logs(self._folder))
        previous = [log[:-1] if rank in living else log for rank, log in enumerate(logs)]
        return bool(judge_collectives(logs, living)) and not judge_collectives(previous, living)


def joining_processes(folder: Path) -> tuple[Joining, ...]:
    """Return processes that failed or wait in `init_process_group`, if at least one failed."""
    return tuple(_read_joining(folder, RAISED, SUFFIX)) if _read_joining(folder, RAISED) else ()


def _read_joining(folder: Path, *suffixes: str) -> list[Joining]:
    notes = []
    for file in (path for suffix in suffixes for path in folder.glob(f"*{suffix}")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # removed when the process leaves init_process_group
            notes.append(msgspec.json.decode(file.read_bytes(), type=Joining))
    return sorted(notes, key=lambda note: (note.rank, note.pid))


class _RendezvousWatch:
    """Detect that processes in `init_process_group` wait for processes that have ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._since = 0.0
        self._before: dict[int, float] = {}

    def waiting_in_vain(self, now: float, timeout: float) -> tuple[Joining, ...]:
        """Return the processes in `init_process_group` if all waited in vain for `timeout` seconds."""
        notes = tuple(note for note in _read_joining(self._folder, SUFFIX) if live_ranks.is_alive(note.pid))
        if self._before.keys() != {note.pid for note in notes}:
            self._restart_timer(notes, now)
        if not notes or now - self._since < timeout:
            return ()
        seconds = now - self._since
        waiting = all(live_ranks.is_idle(self._before[n.pid], processor_seconds(n.pid), seconds) for n in notes)
        self._restart_timer(notes, now)
        needed = max(note.started or note.world_size for note in notes)
        missing = needed - len(notes)
        if missing > 0 and all(note.started for note in notes):
            pids = {note.pid for note in notes}
            missing = sum(pid not in pids and live_ranks.is_alive(pid) for pid in live_ranks.children_of(os.getpid()))
        return notes if waiting and needed > 0 >= missing else ()

    def _restart_timer(self, notes: tuple[Joining, ...], now: float) -> None:
        self._since, self._before = now, {note.pid: processor_seconds(note.pid) or 0.0 for note in notes}


def end_agent() -> None:
    """Send SIGTERM to this process, in which torchrun's agent then ends the ranks."""
    os.kill(os.getpid(), signal.SIGTERM)
