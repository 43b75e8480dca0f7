"""Which of the other ranks' processes are still there: at once on this machine, by their heartbeats on another.

A thread of a launched rank watches them and the launcher, and calls the task of a run that is under way.

This module is light: it never imports torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ddpcheck.worlds.launchers.detection import BY_HAND, LauncherEnv
from ddpcheck.worlds.launchers.store import LauncherStore, StoreGoneError

_BEAT = 1.0  # seconds between heartbeats
_SILENCE = 60.0  # without one: longer than a thread may be kept from running by an import or a compilation
_IDLE = 0.25  # seconds between looks when nothing runs
_BUSY = 0.02  # and while something does
_ORPHANED = 5.0  # for this process to end by itself without a launcher


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
            elif now > self._beats[rank][1] + _SILENCE:
                self.remote.remove(rank)
                found.append(rank)
        return found

    def close(self) -> None:
        """Stop watching."""
        for descriptor in (*self._descriptors, self._wake_up, self._wake, self._kept):
            if descriptor is not None:
                os.close(descriptor)
        self._descriptors.clear()


class PeerWatch:
    """Watches the ranks of a launch, and the launcher, from one of them.

    Attributes:
        gone: Ranks that have ended without leaving: how, in words, and the exit code where that is known.
        terminated: When this process was asked to end or lost its launcher, by `time.monotonic()`; `None` before.
        started: Whether the other ranks are watched.
    """

    def __init__(self, launch: LauncherEnv) -> None:
        self.gone: dict[int, tuple[str, int | None]] = {}
        self.terminated: float | None = None
        self.started = False
        self._launch = launch
        self._parent = os.getppid()
        self._orphaned: float | None = None
        self._task: Callable[[], None] | None = None
        self._stop = False

    def start(
        self, peers: Mapping[int, Peer], store: LauncherStore, directory: Path, on_bug: Callable[[str], object]
    ) -> None:
        """Begin to watch every rank.

        The directory is removed where this process has to end without its launcher; `on_bug` is called with a sentence
        where the thread cannot go on.
        """
        self._peers = Peers(self._launch.rank, peers)
        if not self._launch.agent and self._launch.rank:
            store.kept = self._peers.lookout(0)
        self._thread = threading.Thread(
            target=self._watch, args=(store, directory, on_bug), name="ddpcheck-ranks", daemon=True
        )
        self._thread.start()
        self.started = True

    def stop(self) -> None:
        """Watch no more."""
        self._stop = True
        if self.started:
            self._peers.wake()
            self._thread.join(5.0)
            if not self._thread.is_alive():
                self._peers.close()

    @contextlib.contextmanager
    def calling(self, task: Callable[[], None]) -> Iterator[None]:
        """Call `task` in the thread many times a second while the block runs."""
        self._task = task
        self._peers.wake()
        try:
            yield
        finally:
            self._task = None

    def _watch(self, store: LauncherStore, directory: Path, on_bug: Callable[[str], object]) -> None:
        peers, rank = self._peers, self._launch.rank
        count, beat = 0, 0.0
        while not self._stop:
            self._check_launcher(directory)
            try:
                for other, code in peers.wait(_IDLE if self._task is None else _BUSY).items():
                    if self.gone.get(other) is None and not self._has_left(store, other):
                        self.gone[other] = (_how_it_ended(other, code), code)
                if peers.remote and time.monotonic() > beat + _BEAT:
                    beat, count = time.monotonic(), count + 1
                    store.put(f"beat/{rank}", b"%d" % count)
                    for other in peers.silent(lambda one: _beats(store, one)):
                        self.gone[other] = (f"rank {other} has given no sign of life for a minute", None)
                if (task := self._task) is not None:
                    task()
            except StoreGoneError:
                time.sleep(_BUSY)  # the main thread finds that out by itself, and says so
            except Exception as error:  # a bug of ddpcheck: no rank could be freed any more, so say it
                on_bug(f"the thread that watches them failed on rank {rank}: {error!r}.")
                raise

    def _check_launcher(self, directory: Path) -> None:
        """End this process where its launcher has been killed: nobody else would, should it be stuck."""
        if self._launch.launcher == BY_HAND or os.getppid() == self._parent:
            return
        if self._orphaned is None:
            self._orphaned = self.terminated = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)
        elif time.monotonic() > self._orphaned + _ORPHANED:
            shutil.rmtree(directory, ignore_errors=True)
            os._exit(128 + signal.SIGTERM)

    def _has_left(self, store: LauncherStore, rank: int) -> bool:
        if rank == 0 and not self._launch.agent:
            return False  # the store has ended with it: do not ask
        try:
            return store.has(f"left/{rank}")
        except StoreGoneError:
            return False


def _beats(store: LauncherStore, rank: int) -> int:
    return int(store.get(f"beat/{rank}")) if store.has(f"beat/{rank}") else 0


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


def _how_it_ended(rank: int, code: int | None) -> str:
    """The end of a rank's process in words."""
    if code is None:
        return f"rank {rank} has ended (its launcher knows how)"
    if code < 0:
        try:
            return f"rank {rank} was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"rank {rank} was killed by signal {-code}"
    return f"rank {rank} ended with exit code {code}, without a Python exception"
