"""Detection of deadlocks: ranks that wait for each other, or for one that has finished, long before the deadline.

It takes all of this together, over seconds: every rank that has not finished is inside a call of `torch.distributed`, a
backward pass or the wrapper, always on the same line; no thread of any rank stays runnable, and none has used more
processor time than waiting does; and no rank has another Python thread. Whoever computes, sleeps, reads a file or moves
data does not look like that. Linux only, and not for ranks on a GPU, whose work does not show in their process.
"""

from __future__ import annotations

import math
import os
import sys
import time

from ddpcheck.findings.files import process_stat
from ddpcheck.findings.stacks import Frame, has_other_threads, own_stack, waits_for_others
from ddpcheck.findings.wording import format_ranks
from ddpcheck.worlds.rank_processes import RankProcesses

INTERVAL = 0.5  # seconds between two looks
_SECONDS = 3.0  # of stillness
_QUIET = 1.0  # of them before stacks are looked at, which disturbs ranks
_SHARE = 0.02  # of a core: gloo's threads look around every 10 ms while they wait, and so does a store
_GLANCES = 10  # at a thread that is runnable: one that waits sleeps in some of them, also where it is short of a core
_LOCAL_SOCKET = "__skb_wait_for_more_packets"  # in which a thread of torch's waits in each worker
_BETWEEN = 0.003  # seconds from one to the next


class DeadlockDetector:
    """Looks at the ranks of one run from time to time, and says so when they are stuck for good."""

    def __init__(self, processes: RankProcesses, device: str) -> None:
        self._processes = processes
        several = len(processes.ranks) > 1 and processes.one_machine
        self._possible = sys.platform == "linux" and device == "cpu" and several
        self._next = 0.0
        self.reset()

    def reset(self) -> None:
        """Forget what was seen: time has passed in which nobody looked."""
        self._since: float | None = None
        self._used: list[float] = []
        self._stacks: dict[int, tuple[Frame, ...]] = {}

    def wait(self, now: float) -> float:
        """Seconds until the next look is due; infinite where a deadlock cannot be detected."""
        return max(0.0, self._next - now) if self._possible else math.inf

    def verdict(self, now: float) -> str:
        """Look, if it is time, and return the sentence that ends the run; empty as long as there may be hope."""
        if self.wait(now) > 0.0:
            return ""
        self._next = now + INTERVAL
        used = self._processor_seconds()
        if self._since is None or used is None or not self._is_still(used, now - self._since):
            self.reset()
            if used is not None:
                self._since, self._used = now, used
            return ""
        if now - self._since < _SECONDS:
            return ""
        finished = [rank.number for rank in self._processes.ranks if rank.number not in self._stacks]
        if not finished:
            return "every rank waits for another one, in collectives that do not match"
        return (
            f"{format_ranks([*self._stacks])} {'waits' if len(self._stacks) == 1 else 'wait'} in a collective, and "
            f"{format_ranks(finished)} {'has' if len(finished) == 1 else 'have'} finished without it, or joined it "
            "with a different shape"
        )

    def _is_still(self, used: list[float], seconds: float) -> bool:
        """Whether nothing has happened for some seconds, and all who have not finished wait for others."""
        allowed = 0.02 + _SHARE * seconds  # the first term: the kernel counts in steps of 10 ms
        if any(after - before > allowed for before, after in zip(self._used, used, strict=True)):
            return False
        if seconds < _QUIET:
            return True
        before, self._stacks = self._stacks, self._waiting_stacks()
        return bool(self._stacks) and before in ({}, self._stacks)

    def _processor_seconds(self) -> list[float] | None:
        """What each rank has used so far; `None` when one is at work, or about to be, at this moment."""
        used = []
        for rank in self._processes.ranks:
            if rank.pid is None or rank.ended is not None or (seconds := processor_seconds(rank.pid)) is None:
                return None
            used.append(seconds)
        return used

    def _waiting_stacks(self) -> dict[int, tuple[Frame, ...]]:
        """The stacks of the ranks that have not finished; empty when one of them is not waiting for another rank."""
        waiting = [rank for rank in self._processes.ranks if rank.answer is None]
        dumps = self._processes.dump_stacks(everyone=True)
        stacks = {rank.number: own_stack(dumps.get(rank.number, "")) for rank in waiting}
        if any(rank.answer is not None for rank in waiting) or not all(map(waits_for_others, stacks.values())):
            return {}
        return {} if any(map(has_other_threads, dumps.values())) else stacks


def processor_seconds(pid: int, *, beside_main: bool = False) -> float | None:
    """The processor seconds that a process has used, `None` when one of its threads runs, or is about to, for long.

    `beside_main`: without its main thread.
    """
    try:
        awake = [thread for thread in os.listdir(f"/proc/{pid}/task") if not beside_main or thread != str(pid)]
        for glance in range(_GLANCES):
            if glance:
                time.sleep(_BETWEEN)
            awake = [thread for thread in awake if process_stat(f"{pid}/task/{thread}")[0] != "S"]
            if not awake:
                ticks = _ticks(str(pid)) - (_ticks(f"{pid}/task/{pid}") if beside_main else 0)
                return ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):  # it has ended
        pass
    return None


def _ticks(task: str) -> int:
    """What a process or thread has used."""
    fields = process_stat(task)
    return int(fields[11]) + int(fields[12])


def gloo_wants_gil(pid: int) -> bool:
    """Whether a thread of gloo's waits for the GIL: Python has it look every 5 ms, while one without work sleeps."""
    threads = [thread for thread in os.listdir(f"/proc/{pid}/task") if _read(f"{pid}/task/{thread}/comm") == _GLOO]
    before = [switches(f"{pid}/task/{thread}") for thread in threads]
    time.sleep(_FOR_GIL)
    after = [switches(f"{pid}/task/{thread}") for thread in threads]
    return any(late - early >= _LOOKS_FOR_GIL for early, late in zip(before, after, strict=True))


_GLOO = "pt_gloo_runloop"
_FOR_GIL = 0.5  # seconds, in which it looks 100 times where nothing else runs
_LOOKS_FOR_GIL = 10


def switches(task: str) -> int:
    """How often a thread has gone to sleep."""
    return int(status_value(task, "voluntary_ctxt_switches") or 0)


def status_value(task: str, name: str) -> str:
    """A value of the status of a process or thread; empty if there is none."""
    lines = _read(f"{task}/status").splitlines()
    return next((line.split()[1] for line in lines if line.startswith(f"{name}:")), "")


def _read(file: str) -> str:
    with open(f"/proc/{file}", encoding="utf-8", errors="replace") as stream:
        return stream.read().strip()


def locked_children(pid: int) -> dict[int, int]:
    """The children of a process that wait for a lock, each with how often its threads have ever slept.

    Who computes, sleeps, reads or waits for the network, in any thread, is none of them. Empty where the kernel does
    not tell.
    """
    found = {}
    for child in children_of(pid):
        threads = [f"{child}/task/{thread}" for thread in os.listdir(f"/proc/{child}/task")]
        waits = {thread: _read(f"{thread}/wchan") for thread in threads}
        main = waits.get(f"{child}/task/{child}", "")
        if "futex" in main and all("futex" in one or one == _LOCAL_SOCKET for one in waits.values()):
            found[child] = sum(map(switches, threads))
    return found


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, as far as the kernel tells; those that have just ended may be there."""
    lists = (_read(f"{pid}/task/{thread}/children") for thread in os.listdir(f"/proc/{pid}/task"))
    return [int(child) for children in lists for child in children.split()]
