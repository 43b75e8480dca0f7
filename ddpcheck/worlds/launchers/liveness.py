"""Which of the other ranks' processes are still there: at once on this machine, by their heartbeats on another.

This module is light: it never imports torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

BEAT = 1.0  # seconds between heartbeats
SILENCE = 60.0  # without one: longer than a thread may be kept from running by an import or a compilation


@dataclass(frozen=True, slots=True)
class Peer:
    """The machine and the process of a rank."""

    machine: str
    pid: int


def this_machine() -> str:
    """A name that is the same for the processes that can see each other's ids, and for no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode()}"


class Peers:
    """The other ranks of a session."""

    def __init__(self, me: int, peers: Mapping[int, Peer]) -> None:
        """Begin to watch; who has ended already is found by the first `wait`."""
        machine = peers[me].machine
        self.remote = [rank for rank, peer in peers.items() if peer.machine != machine]
        self._local = {rank: peer.pid for rank, peer in peers.items() if peer.machine == machine and rank != me}
        self._descriptors: dict[int, int] = {}
        self._kept: int | None = None
        self._poll = select.poll()
        self._wake_up, self._wake = os.pipe()
        self._poll.register(self._wake_up, select.POLLIN)
        self._beats: dict[int, tuple[int, float]] = {}
        for rank, pid in self._local.items():
            if hasattr(os, "pidfd_open"):
                with contextlib.suppress(OSError):  # an old kernel, or it has ended: seen by its id
                    descriptor = os.pidfd_open(pid)
                    self._descriptors[descriptor] = rank
                    self._poll.register(descriptor, select.POLLIN)

    def wake(self) -> None:
        """Have a `wait` in another thread return."""
        with contextlib.suppress(OSError):
            os.write(self._wake, b"x")

    def wait(self, seconds: float) -> dict[int, int | None]:
        """Wait for something to happen; return whose process has ended, with its exit code where that is known."""
        ended: dict[int, int | None] = {}
        for descriptor, _ in self._poll.poll(seconds * 1000):
            if descriptor == self._wake_up:
                os.read(descriptor, 1 << 10)
                continue
            rank = self._descriptors.pop(descriptor)
            self._poll.unregister(descriptor)
            os.close(descriptor)
            ended[rank] = _exit_code(self._local.pop(rank))
        watched = self._descriptors.values()
        for rank, pid in list(self._local.items()):
            if rank not in watched and not _exists(pid):
                ended[rank] = _exit_code(self._local.pop(rank))
        return ended

    def lookout(self, rank: int) -> Callable[[], bool]:
        """A function for any thread that returns whether a rank of this machine still exists."""
        if hasattr(os, "pidfd_open") and rank in self._local:
            with contextlib.suppress(OSError):
                self._kept = os.pidfd_open(self._local[rank])
                return partial(_is_quiet, self._kept)
        return lambda: True

    def silent(self, beat: Callable[[int], int]) -> list[int]:
        """Which ranks on other machines have counted no heartbeat for long; each is named once."""
        now = time.monotonic()
        found = []
        for rank in list(self.remote):
            count = beat(rank)
            if rank not in self._beats or self._beats[rank][0] != count:
                self._beats[rank] = (count, now)
            elif now > self._beats[rank][1] + SILENCE:
                self.remote.remove(rank)
                found.append(rank)
        return found

    def close(self) -> None:
        """Stop watching."""
        for descriptor in (*self._descriptors, self._wake_up, self._wake, self._kept):
            if descriptor is not None:
                os.close(descriptor)
        self._descriptors.clear()


def _is_quiet(descriptor: int) -> bool:
    poll = select.poll()  # of its own: one that two threads use at the same time raises
    poll.register(descriptor, select.POLLIN)
    return not poll.poll(0)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _exit_code(pid: int) -> int | None:
    """The exit code of a process, negative for a signal, as long as its parent has not asked for it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return os.waitstatus_to_exitcode(int(fields[-1])) if fields[0] in "ZX" else None
    except (OSError, ValueError, IndexError):
        return None


def how_it_ended(rank: int, code: int | None) -> str:
    """The end of a rank's process in words."""
    if code is None:
        return f"rank {rank} has ended (its launcher knows how)"
    if code < 0:
        try:
            return f"rank {rank} was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"rank {rank} was killed by signal {-code}"
    return f"rank {rank} ended with exit code {code}, without a Python exception"
