"""Observe the rank processes of an active run from outside; on Linux.

A waiting rank uses no processor time under gloo. Under other backends the main thread may spin and look busy. Such a
rank counts as waiting if its log has an unfinished collective, or if its current line may block and its collectives
are known to mismatch those of other ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ddpcheck.findings.files import process_stat, read_file
from ddpcheck.findings.stacks import BACKWARD, Frame, is_pickling, region_of, waits_for_ranks, waits_for_result
from ddpcheck.record.rank.environment import STACK_SIGNAL
from ddpcheck.stream.log_file import HEAD_SIZE, is_file_open, is_inside
from ddpcheck.stream.rank_log import rank_processes, read_logs
from ddpcheck.worlds.deadlock import processor_seconds
from ddpcheck.worlds.starting import ask_for_stacks

_IDLE_SHARE = 0.02  # fraction of a core that a waiting rank may use
_STACK_TIMEOUT = 1.0  # seconds to wait for stack dumps
_DUMP_PAUSE = 0.05  # seconds without new output after which a stack dump is complete
_LOCAL_SOCKET = "__skb_wait_for_more_packets"  # kernel function in which a torch thread of each worker waits
_NO_INTERPRETER = "Current thread, in which the interpreter has ended"


@dataclass(frozen=True, slots=True)
class RankFacts:
    """State of a rank that has made no logged progress for some time."""

    is_idle: bool  # True if the process used almost no processor time
    spins: bool = False  # True if a waiting rank may use processor time: backends other than gloo
    others_idle: bool = True  # True if threads other than the main thread used almost none
    is_inside: bool = False  # True if the log shows the main thread in a collective
    diverged: bool = False  # True if the last collectives of the ranks are known to mismatch

    @property
    def may_wait(self) -> bool:
        """Return True if the rank may be waiting, judged without its stack."""
        return self.is_idle or (self.spins and (self.diverged or (self.is_inside and self.others_idle)))

    def waits(self, stack: Sequence[Frame]) -> bool:
        """Return True if the rank with this stack waits for other ranks."""
        if not self.may_wait or not stack:
            return False
        if self.is_inside and not is_pickling(stack):
            return True
        if self.is_idle:
            return waits_for_ranks(stack)
        at_wait = waits_for_ranks(stack) or waits_for_result(stack) or region_of(stack) == BACKWARD
        return self.diverged and at_wait and not is_pickling(stack)


class LiveRanks:
    """Processes of the ranks whose logs are in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def live_pids(self) -> tuple[dict[int, int], bool]:
        """Return PIDs of live ranks by rank, and True if all logs are local."""
        ranks, world_size = self.joined()
        return {rank: pid for rank, pid in ranks.items() if is_alive(pid)}, len(ranks) >= world_size

    def joined(self) -> tuple[dict[int, int], int]:
        """Return PIDs of ranks that joined a process group, and the world size."""
        sizes = [int(path.stem.split("-")[2]) for path in self._folder.glob("*-*-*-*.log")]
        return rank_processes(self._folder), max(sizes, default=1)

    def facts(
        self, ranks: dict[int, int], before: dict[int, ProcessorTimes], seconds: float, *, diverged: bool = False
    ) -> dict[int, RankFacts]:
        """Return the state of the ranks; `before`: processor times `seconds` ago, by PID."""
        spinning = {log.started.rank for log in read_logs(self._folder) if log.started.backend != "gloo"}
        facts = {}
        for rank, pid in ranks.items():
            previous, spins = before.get(pid, ProcessorTimes(0.0, 0.0)), rank in spinning
            idle = is_idle(previous.whole, processor_seconds(pid), seconds)
            others = spins and is_idle(
                previous.without_main_thread, processor_seconds(pid, exclude_main_thread=True), seconds
            )
            inside = is_inside(next(self._folder.glob(f"*-{rank}-*-{pid}.calls")))
            facts[rank] = RankFacts(idle, spins, others, inside, diverged)
        return facts

    def progress(self) -> dict[str, bytes]:
        """Return, by file name, bytes that change with progress (steps, batches, collectives, log size)."""
        counters = {}
        for path in sorted(self._folder.glob("*.*")):
            if path.suffix == ".log":
                counters[path.name] = str(path.stat().st_size).encode()
            elif path.suffix in (".steps", ".batches", ".calls"):
                counters[path.name] = read_file(path, HEAD_SIZE if path.suffix == ".calls" else 256, head=True)
        return counters

    def stacks(self, ranks: dict[int, int]) -> dict[int, str]:
        """Return stack dumps by rank; a note for processes without a running interpreter."""
        files = {rank: next(self._folder.glob(f"*-{rank}-*-{pid}.stack")) for rank, pid in ranks.items()}
        asked_pids = {r: pid for r, pid in ranks.items() if _catches_signal(pid) and is_file_open(files[r], pid)}

        def send_signal() -> None:
            for pid in asked_pids.values():  # without a handler the signal would kill the process
                os.kill(pid, STACK_SIGNAL)

        ask_for_stacks([files[rank] for rank in asked_pids], send_signal, _STACK_TIMEOUT, _DUMP_PAUSE)
        stacks = {rank: read_file(files[rank]).decode("utf-8", "replace") for rank in asked_pids}
        return {rank: _NO_INTERPRETER for rank, pid in ranks.items() if not _catches_signal(pid)} | stacks


def is_alive(pid: int) -> bool:
    """Return True if a process is alive and not a zombie; False without /proc."""
    return process_stat(pid)[:1] not in ([], ["Z"])


def is_stopped(pid: int) -> bool:
    """Return True if a process is stopped, e.g. by SIGSTOP; on Linux."""
    return process_stat(pid)[:1] == ["T"]


class ProcessorTimes(NamedTuple):
    """Processor seconds of a rank's process, with and without its main thread."""

    whole: float
    without_main_thread: float


def processor_times(ranks: dict[int, int]) -> dict[int, ProcessorTimes]:
    """Return the processor seconds of ranks up to now, by PID."""
    return {
        pid: ProcessorTimes(processor_seconds(pid) or 0.0, processor_seconds(pid, exclude_main_thread=True) or 0.0)
        for pid in ranks.values()
    }


def is_idle(before: float, now: float | None, seconds: float) -> bool:
    """Return True if processor time barely grew in `seconds`; False if `now` is None."""
    return now is not None and now - before <= 0.1 + _IDLE_SHARE * seconds


def _catches_signal(pid: int) -> bool:
    """Return True if a running interpreter in the process handles the stack dump signal."""
    return bool(int(status_value(str(pid), "SigCgt") or "0", 16) >> (STACK_SIGNAL - 1) & 1)


def gloo_wants_gil(pid: int) -> bool:
    """Return True if a gloo thread waits for the GIL (deadlock at exit)."""
    threads = [thread for thread in os.listdir(f"/proc/{pid}/task") if _read_proc(f"{pid}/task/{thread}/comm") == _GLOO]
    before = [context_switches(f"{pid}/task/{thread}") for thread in threads]
    time.sleep(_GIL_SECONDS)
    after = [context_switches(f"{pid}/task/{thread}") for thread in threads]
    return any(late - early >= _GIL_WAKEUPS for early, late in zip(before, after, strict=True))


_GLOO = "pt_gloo_runloop"  # name of the threads of gloo
_GIL_SECONDS = 0.5  # seconds to count wakeups of a thread, up to 100 if it waits for the GIL
_GIL_WAKEUPS = 10


def context_switches(task: str) -> int:
    """Return the number of voluntary context switches of a thread."""
    return int(status_value(task, "voluntary_ctxt_switches") or 0)


def status_value(task: str, name: str) -> str:
    """Return a field of /proc/<task>/status, or '' if missing."""
    lines = _read_proc(f"{task}/status").splitlines()
    return next((line.split()[1] for line in lines if line.startswith(f"{name}:")), "")


def _read_proc(file: str) -> str:
    with open(f"/proc/{file}", encoding="utf-8", errors="replace") as stream:
        return stream.read().strip()


def locked_children(pid: int) -> dict[int, int]:
    """Return child processes blocked on a lock, as pid -> voluntary context switches.

    Excludes children with a thread that computes, sleeps or reads. An equal number later shows a child still blocked.
    """
    children = {}
    for child in children_of(pid):
        threads = [f"{child}/task/{thread}" for thread in os.listdir(f"/proc/{child}/task")]
        wchans = {thread: _read_proc(f"{thread}/wchan") for thread in threads}
        main_wchan = wchans.get(f"{child}/task/{child}", "")
        if "futex" in main_wchan and all("futex" in wchan or wchan == _LOCAL_SOCKET for wchan in wchans.values()):
            children[child] = sum(map(context_switches, threads))
    return children


def children_of(pid: int) -> list[int]:
    """Return the pids of the child processes, possibly including just exited children."""
    pid_lists = (_read_proc(f"{pid}/task/{thread}/children") for thread in os.listdir(f"/proc/{pid}/task"))
    return [int(child) for children in pid_lists for child in children.split()]
