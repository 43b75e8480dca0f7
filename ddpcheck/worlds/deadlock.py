"""Detection of CPU ranks that wait for each other or for finished ranks (Linux).

Ranks are in a deadlock if for `_SECONDS` each unfinished rank stays on one line inside a `torch.distributed` call, a
backward pass or DDP, no thread stays runnable or uses more CPU time than waiting takes, and no rank has another Python
thread. Ranks that compute, sleep, read files or transfer data are not.
"""

from __future__ import annotations

import math
import os
import sys
import time

from ddpcheck.findings.files import process_stat
from ddpcheck.findings.stacks import Frame, has_other_threads, main_stack, waits_for_ranks
from ddpcheck.findings.wording import format_ranks, pluralize_verb
from ddpcheck.worlds.rank_processes import RankProcesses

INTERVAL = 0.5  # seconds between two checks
_SECONDS = 3.0  # seconds without activity before a deadlock is reported
_QUIET = 1.0  # seconds without activity before stacks are dumped, which disturbs ranks
_SHARE = 0.02  # fraction of a core that a waiting rank may use: gloo and stores poll every 10 ms
_SAMPLES = 10  # samples per runnable thread: a waiting thread sleeps in some, even if cores are busy
_SAMPLE_PAUSE = 0.003  # seconds between samples


class DeadlockDetector:
    """Periodic deadlock check of the ranks during one call of `World.run`."""

    def __init__(self, processes: RankProcesses, device: str) -> None:
        self._processes = processes
        is_local = len(processes.ranks) > 1 and processes.one_machine
        self._is_supported = sys.platform == "linux" and device == "cpu" and is_local  # GPU work shows in no process
        self._next_check = 0.0
        self.reset()

    def reset(self) -> None:
        """Discard all observations, for example after a pause without checks."""
        self._idle_since: float | None = None
        self._cpu_seconds: list[float] = []
        self._stacks: dict[int, tuple[Frame, ...]] = {}

    def seconds_until_check(self, now: float) -> float:
        """Return the seconds until the next check, or inf if ranks cannot be checked."""
        return max(0.0, self._next_check - now) if self._is_supported else math.inf

    def check_if_due(self, now: float) -> str:
        """Check the ranks if due; return a sentence on a deadlock, or ''."""
        if self.seconds_until_check(now) > 0.0:
            return ""
        self._next_check = now + INTERVAL
        cpu_seconds = self._processor_seconds()
        if self._idle_since is None or cpu_seconds is None or not self._is_idle(cpu_seconds, now - self._idle_since):
            self.reset()
            if cpu_seconds is not None:
                self._idle_since, self._cpu_seconds = now, cpu_seconds
        if self._idle_since is None or now - self._idle_since < _SECONDS:
            return ""
        finished = [rank.number for rank in self._processes.ranks if rank.number not in self._stacks]
        if not finished:
            return "every rank waits for another one, in collectives that do not match"
        return (
            f"{format_ranks([*self._stacks])} {pluralize_verb('waits', [*self._stacks])} in a collective, and "
            f"{format_ranks(finished)} {pluralize_verb('has', finished)} finished without it, or joined it "
            "with a different shape"
        )

    def _is_idle(self, cpu_seconds: list[float], seconds: float) -> bool:
        """Return True if ranks used almost no CPU time and all unfinished ranks wait."""
        allowed = 0.02 + _SHARE * seconds  # first term: the kernel counts in steps of 10 ms
        if any(after - before > allowed for before, after in zip(self._cpu_seconds, cpu_seconds, strict=True)):
            return False
        if seconds < _QUIET:
            return True
        before, self._stacks = self._stacks, self._waiting_stacks()
        return bool(self._stacks) and before in ({}, self._stacks)

    def _processor_seconds(self) -> list[float] | None:
        cpu_seconds = []
        for rank in self._processes.ranks:
            if rank.pid is None or rank.ended is not None or (seconds := processor_seconds(rank.pid)) is None:
                return None
            cpu_seconds.append(seconds)
        return cpu_seconds

    def _waiting_stacks(self) -> dict[int, tuple[Frame, ...]]:
        """Return the stacks of the unfinished ranks if all of them wait, else {}."""
        waiting = [rank for rank in self._processes.ranks if rank.answer is None]
        dumps = self._processes.dump_stacks(everyone=True)
        stacks = {rank.number: main_stack(dumps.get(rank.number, "")) for rank in waiting}
        if any(rank.answer is not None for rank in waiting) or not all(map(waits_for_ranks, stacks.values())):
            return {}
        return {} if any(map(has_other_threads, dumps.values())) else stacks


def processor_seconds(pid: int, *, exclude_main_thread: bool = False) -> float | None:
    """Return the CPU seconds that a process has used, if all its threads sleep.

    Return `None` if a thread runs or the process has exited. `exclude_main_thread`: consider only the other threads.
    """
    try:
        threads = [t for t in os.listdir(f"/proc/{pid}/task") if not exclude_main_thread or t != str(pid)]
        for attempt in range(_SAMPLES):
            if attempt:
                time.sleep(_SAMPLE_PAUSE)
            threads = [thread for thread in threads if process_stat(f"{pid}/task/{thread}")[0] != "S"]
            if not threads:
                ticks = _ticks(str(pid)) - (_ticks(f"{pid}/task/{pid}") if exclude_main_thread else 0)
                return ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):  # the process has exited
        pass
    return None


def _ticks(task: str) -> int:
    fields = process_stat(task)
    return int(fields[11]) + int(fields[12])
