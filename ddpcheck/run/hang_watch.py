"""Watches from outside whether the ranks of a script get on, and ends it when all that live cannot.

They wait for each other, or have run all of the script and do not end: a deadlock of torch's, which needs no ddpcheck.
Where a `DistributedDataParallel` is freed after `destroy_process_group()`, its reducer has the last reference to the
group. ~ProcessGroupGloo joins the group's threads, while Python has the GIL (`Reducer` is bound without releasing it);
a thread that has yet to free its last work waits for the GIL, since the thread-local state in a work refers to Python.
Seen in 1 of 50 short scripts without ddpcheck. To wait a moment before the group is destroyed avoids it (`rank_watch`).

A rank that waits uses no processor time under gloo. Under other backends its main thread may be busy all the time (it
spins), as if it worked. Such a rank waits if its own record says that it has not come out of a collective; or if it is
at a line that may block, and its collectives are known not to match those of the others.

This module is light: it never imports torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ddpcheck.findings.stacks import (
    BACKWARD,
    WORKERS,
    Frame,
    has_no_python_left,
    own_stack,
    pickles,
    region_of,
    waits_for_others,
    waits_for_result,
)
from ddpcheck.findings.wording import format_ranks
from ddpcheck.judge.endings.collective_order import judge_collectives
from ddpcheck.record.rank.environment import STACK_SIGNAL
from ddpcheck.run.node_link import NodeLink, Standing
from ddpcheck.stream.collective_ring import HEAD_SIZE, is_inside
from ddpcheck.stream.entries import RankRaised
from ddpcheck.stream.held_file import is_held
from ddpcheck.stream.watched_rank import comparable_logs, rank_processes, read_logs
from ddpcheck.worlds import failures
from ddpcheck.worlds.deadlock import gloo_wants_gil, locked_children, processor_seconds

_INTERVAL = 0.5  # seconds between two looks
_SHARE = 0.02  # of a core that a rank may use while it waits
_FOR_STACKS = 1.0  # seconds
_GRACE = 3.0  # seconds that a rank has to end after it was told to
_NO_INTERPRETER = "Current thread, in which the interpreter has ended"
_LOCKED = 5.0  # seconds in which a locked process has not woken up
_MISMATCH = 5.0  # seconds without progress, where collectives are known not to match
_FOR_NODES = 1.0  # seconds in which other nodes hear that all ranks are to be ended


@dataclass(frozen=True, slots=True)
class Hang:
    """Ranks that have not got on; `stacks` of those that live, by rank."""

    seconds: float
    stacks: dict[int, str]


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


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What is known of a rank that has left no trace of progress for some time.

    Attributes:
        is_idle: Whether its process has used next to no processor time.
        spins: Whether ranks may use it while they wait: not under gloo.
        others_idle: Whether the threads beside the main one have used next to none.
        is_inside: Whether its main thread is in a collective, or waits for one, by its record.
        parted: Whether what the ranks have called last is known not to match.
    """

    is_idle: bool
    spins: bool = False
    others_idle: bool = True
    is_inside: bool = False
    parted: bool = False

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
    ) -> None:
        """Begin.

        Args:
            folder: Of the logs.
            timeout: Seconds.
            end: Called once the ranks that live have not got on for so long, and cannot.
            tell: Takes a sentence on a rank that has failed, where torchrun has to wait for the others.
            nodes: The other nodes, if their ranks are watched as well.
        """
        self.hang: Hang | None = None
        self.unended: Unended | None = None
        self._folder = folder
        self._timeout = timeout
        self._end = end
        self._tell = tell
        self._nodes = nodes
        self._stuck: _Stuck | None = None
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
        seen: tuple[bytes, ...] = ()
        progress, since, used, is_stuck = 0.0, 0.0, dict[int, _Used](), False
        while not self._over.wait(_INTERVAL):
            try:
                ranks, are_all_here = self._living()
                self._tell_what_raised(ranks)
                now, before = time.monotonic(), seen
                seen = self._progress()
                if not ranks or seen != before:
                    progress, since, used, is_stuck = now, now, _used(ranks), False
                elif is_stuck and not all(one.may_wait for one in self._facts(ranks, used, now - since).values()):
                    since, used, is_stuck = now, _used(ranks), False
                elif now - since >= self._timeout or (
                    now - since >= _MISMATCH and are_all_here and self._do_not_match(ranks)
                ):
                    is_late = now - progress >= self._timeout
                    parted = is_late and are_all_here and self._part_now(ranks)
                    facts = self._facts(ranks, used, now - since, parted=parted)
                    is_stuck = self._cannot_get_on(ranks, facts, now - progress, are_all_here)
                    since, used = now, _used(ranks)
                if self.hang or self.unended or self._nodes_must_end(ranks, is_stuck=is_stuck):
                    self._end_ranks(ranks)
                    return
            except OSError:  # a rank has just ended
                seen = ()

    def _living(self) -> tuple[dict[int, int], bool]:
        """The processes of the ranks of the last start that live, by rank; and whether none is somewhere else.

        One that has left no log has not begun, or is on another machine, where it may be at work.
        """
        ranks, world_size = self._joined()
        return {rank: pid for rank, pid in ranks.items() if lives(pid)}, len(ranks) >= world_size

    def _joined(self) -> tuple[dict[int, int], int]:
        """The processes of the ranks of the last start that have joined the process group, and its size."""
        sizes = [int(path.stem.split("-")[2]) for path in self._folder.glob("*.log")]
        return rank_processes(self._folder), max(sizes, default=1)

    def _tell_what_raised(self, living: dict[int, int]) -> None:
        """Say once what a rank has raised, where others do not end at SIGTERM: torchrun waits 30 seconds for them."""
        if self._tell is None or not living or living.keys() == rank_processes(self._folder).keys():
            self._failed_since = 0.0
        elif not self._failed_since:
            self._failed_since = time.monotonic()
        elif time.monotonic() - self._failed_since >= _GRACE:
            tell, self._tell = self._tell, None
            gone = [log for log in read_logs(self._folder) if log.started.rank not in living]
            for log in gone:
                for entry in log.entries:
                    if isinstance(entry, RankRaised):
                        raised = failures.raised(log.started.rank, dict(entry.reply))
                        where = f" at {raised.location}" if raised.location else ""
                        tell(f"{raised.message}{where}; torchrun waits for {format_ranks(living)} to end")
                        return

    def _facts(
        self, ranks: dict[int, int], used: dict[int, _Used], seconds: float, *, parted: bool = False
    ) -> dict[int, RankFacts]:
        """What is known of the ranks, of which `used` was that before some seconds."""
        spinning = {log.started.rank for log in read_logs(self._folder) if log.started.backend != "gloo"}
        facts = {}
        for rank, pid in ranks.items():
            before = used.get(pid, _Used(0.0, 0.0))
            spins = rank in spinning
            facts[rank] = RankFacts(
                _is_idle(before.whole, processor_seconds(pid), seconds),
                spins,
                spins and _is_idle(before.beside_main, processor_seconds(pid, beside_main=True), seconds),
                is_inside(next(self._folder.glob(f"*-{rank}-*-{pid}.calls"))),
                parted,
            )
        return facts

    def _cannot_get_on(
        self, ranks: dict[int, int], facts: dict[int, RankFacts], seconds: float, are_all_here: bool
    ) -> bool:
        """Whether each of the ranks waits for others in vain, or cannot end; says so in `self`.

        Where some are on other nodes, these may get on.
        """
        if not all(one.may_wait for one in facts.values()):
            return False
        stacks = self._stacks(ranks)
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
        if not all(self._waits_for_locked_worker(ranks[rank], waiting[rank]) for rank in elsewhere):
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
        ranks, world_size = self._joined()
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

    def _end_ranks(self, ranks: dict[int, int]) -> None:
        """End them; those that do not heed it, and do not work either, are killed. A handler in Python needs a rank
        that comes back from C++, which these cannot; torchrun would wait 30 seconds for it.
        """
        with self._ending:
            if self._over.is_set():
                return
            self._end()
        while living := {rank: pid for rank, pid in ranks.items() if lives(pid)}:
            used = {pid: processor_seconds(pid) for pid in living.values()}
            if is_over := self._over.wait(_GRACE):  # who has started these has ended before them
                time.sleep(_INTERVAL)
            for pid in living.values():
                if lives(pid) and _is_idle(used[pid] or 0.0, processor_seconds(pid), _GRACE):
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

    def _progress(self) -> tuple[bytes, ...]:
        """What changes as long as a rank gets on: steps, batches, collectives and their ends, entries of the log."""
        found = []
        for path in sorted(self._folder.glob("*.*")):
            if path.suffix == ".log":
                found.append(str(path.stat().st_size).encode())
            elif path.suffix in (".steps", ".batches", ".calls"):
                with path.open("rb") as file:
                    found.append(file.read(HEAD_SIZE if path.suffix == ".calls" else 256))
        return tuple(found)

    def _stacks(self, ranks: dict[int, int]) -> dict[int, str]:
        """The stacks of those ranks that can write them."""
        files = {rank: next(self._folder.glob(f"*-{rank}-*-{pid}.stack")) for rank, pid in ranks.items()}
        asked = {rank: pid for rank, pid in ranks.items() if _catches_signal(pid) and is_held(files[rank], pid)}
        for rank, pid in asked.items():  # another one would end at the signal, or write into a file of the script
            os.truncate(files[rank], 0)
            os.kill(pid, STACK_SIGNAL)
        deadline = time.monotonic() + _FOR_STACKS
        while time.monotonic() < deadline and not all(files[rank].stat().st_size for rank in asked):
            time.sleep(0.01)
        time.sleep(0.05)  # for the last lines
        stacks = {rank: files[rank].read_text("utf-8", "replace") for rank in asked}
        return {rank: _NO_INTERPRETER for rank, pid in ranks.items() if not _catches_signal(pid)} | stacks


def lives(pid: int) -> bool:
    """Whether a process has not ended; one has, if its parent alone has not asked for it yet. On Linux."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class _Used(NamedTuple):
    """The processor seconds that a rank has used: of its process, and of the threads beside its main one."""

    whole: float
    beside_main: float


def _used(ranks: dict[int, int]) -> dict[int, _Used]:
    return {
        pid: _Used(processor_seconds(pid) or 0.0, processor_seconds(pid, beside_main=True) or 0.0)
        for pid in ranks.values()
    }


def _is_idle(before: float, now: float | None, seconds: float) -> bool:
    """Whether a process or thread has used next to no processor time in some seconds; `None` for one that runs."""
    return now is not None and now - before <= 0.1 + _SHARE * seconds


def _catches_signal(pid: int) -> bool:
    """Whether a process still writes its stack when it is asked to: an interpreter that has ended does not."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (STACK_SIGNAL - 1) & 1)
    return False


def end_agent() -> None:
    """Have torchrun's agent, which this process is, end the ranks."""
    os.kill(os.getpid(), signal.SIGTERM)
