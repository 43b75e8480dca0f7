"""One session as a child process: its wall time, and CPU time and memory of every process that comes of it.

A process that outlives its parent is adopted by this one (`PR_SET_CHILD_SUBREAPER`), which waits for it: so the kernel
adds its CPU time to that of our children, and none is missed or left behind. Memory is the proportional set size, in
which a page that n processes share counts 1/n in each, summed over the tree several times a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_SAMPLE = 0.1  # seconds between two readings of memory, which hold up the processes that are read


@dataclass(frozen=True, slots=True)
class Memory:
    """Peaks of the proportional set size, in bytes.

    Attributes:
        total: Of all processes of the session.
        below: Of all but its first process.
    """

    total: int
    below: int


@dataclass(frozen=True, slots=True)
class Session:
    """What has come of one.

    Attributes:
        wall: Seconds until its first process had ended.
        cpu: Seconds of CPU time of all its processes.
        memory: Peaks, where asked for.
        code: Exit code; None where the deadline has passed.
        output: What it printed.
        left: Processes that had not ended some seconds after the first, and were killed.
    """

    wall: float
    cpu: float
    memory: Memory | None
    code: int | None
    output: str
    left: int


def adopt_orphans() -> None:
    """Have processes that lose their parent become our children; measuring is for a program that has no others."""
    if not sys.platform.startswith("linux"):
        raise OSError("This benchmark needs Linux: CPU time and memory of a tree of processes are read from /proc.")
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    if psutil.Process().children():
        raise RuntimeError("This process has children already, which would be taken for those of a session.")


def run_session(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    deadline: float,
    memory: bool = False,
    orphans: float = 10.0,
) -> Session:
    """Run `command` to its end; after `adopt_orphans`.

    Args:
        command: Program and arguments.
        environment: All of its environment; temporary files go to a directory that is removed.
        deadline: Seconds until it and all that came of it is killed.
        memory: Whether to read memory, which costs time: such a session is not one to time.
        orphans: Seconds that what outlives its first process has to end by itself.
    """
    peak = Memory(0, 0)
    with tempfile.TemporaryDirectory(prefix="harnesses-") as directory:
        output = Path(directory, "output")
        before = _cpu()
        begun = time.perf_counter()
        with output.open("wb") as sink:
            process = subprocess.Popen(
                command,
                env={**environment, "TMPDIR": directory},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C ends us, and we end it
            )
        try:
            ended = False
            with _ending(process.pid) as ending:
                while not ended and (rest := begun + deadline - time.perf_counter()) > 0:
                    ended = bool(ending.poll(1e3 * min(_SAMPLE, rest) if memory else 1e3 * rest))
                    if memory and not ended:
                        peak = _higher(peak, process.pid)
            wall = time.perf_counter() - begun
            code = process.wait() if ended else None
            left = 0 if ended and _reap(orphans) else _count()
        finally:
            _kill(process)
        text = output.read_text(encoding="utf-8", errors="replace")
    return Session(wall, _cpu() - before, peak if memory else None, code, text, left)


@contextlib.contextmanager
def _ending(pid: int) -> Iterator[select.poll]:
    """Something to poll for the end of a process."""
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        yield poll
    finally:
        os.close(descriptor)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _higher(peak: Memory, first: int) -> Memory:
    total = below = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            size = process.memory_full_info().pss
            total += size
            below += size if process.pid != first else 0
    return Memory(max(peak.total, total), max(peak.below, below))


def _count() -> int:
    return len(psutil.Process().children(recursive=True))


def _reap(seconds: float) -> bool:
    """Wait until no child is left; return whether that was in time."""
    end = time.monotonic() + seconds
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == 0:
            if time.monotonic() > end:
                return False
            time.sleep(0.005)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a session; one that forks meanwhile is killed in the next turn."""
    while _count():
        for each in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                each.send_signal(signal.SIGKILL)
        if process.returncode is None:
            process.wait()
        _reap(1.0)
