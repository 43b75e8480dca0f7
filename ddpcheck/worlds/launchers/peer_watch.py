"""A thread of a launched rank: watches the other ranks and the launcher, and calls the task of a run that is under way.

This module is light: it never imports torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ddpcheck.worlds.launchers.detection import BY_HAND, LauncherEnv
from ddpcheck.worlds.launchers.liveness import BEAT, Peer, Peers, how_it_ended
from ddpcheck.worlds.launchers.store import LauncherStore, StoreGoneError

_IDLE = 0.25  # seconds between looks when nothing runs
_BUSY = 0.02  # and while something does
_ORPHANED = 5.0  # for this process to end by itself without a launcher


class PeerWatch:
    """Watches the ranks of a launch from one of them.

    Attributes:
        gone: Ranks that have ended without leaving: how, in words, and the exit code where that is known.
        terminated: When this process was asked to end or lost its launcher, by `time.monotonic()`; `None` before.
    """

    def __init__(self, launch: LauncherEnv) -> None:
        self.gone: dict[int, tuple[str, int | None]] = {}
        self.terminated: float | None = None
        self._launch = launch
        self._parent = os.getppid()
        self._orphaned: float | None = None
        self._task: Callable[[], None] | None = None
        self._stop = False
        self._peers: Peers | None = None
        self._thread: threading.Thread | None = None

    @property
    def started(self) -> bool:
        """Whether the other ranks are watched."""
        return self._peers is not None

    def start(
        self, peers: Mapping[int, Peer], store: LauncherStore, directory: Path, on_bug: Callable[[str], object]
    ) -> None:
        """Begin to watch.

        Args:
            peers: Every rank.
            store: Of the ranks.
            directory: Removed where this process has to end without its launcher.
            on_bug: Called with a sentence where the thread cannot go on.
        """
        self._peers = Peers(self._launch.rank, dict(peers))
        if not self._launch.agent and self._launch.rank:
            store.kept = self._peers.lookout(0)
        several_machines = len({peer.machine for peer in peers.values()}) > 1
        arguments = (self._peers, store, directory, several_machines, on_bug)
        self._thread = threading.Thread(target=self._watch, args=arguments, name="ddpcheck-ranks", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._stop = True
        if self._thread is not None and self._peers is not None:
            self._peers.wake()
            self._thread.join(5.0)
            if not self._thread.is_alive():
                self._peers.close()

    @contextlib.contextmanager
    def calling(self, task: Callable[[], None]) -> Iterator[None]:
        """Call `task` in the thread many times a second while the block runs."""
        assert self._peers is not None
        self._task = task
        self._peers.wake()
        try:
            yield
        finally:
            self._task = None

    def _watch(
        self,
        peers: Peers,
        store: LauncherStore,
        directory: Path,
        several_machines: bool,
        on_bug: Callable[[str], object],
    ) -> None:
        count, beat, rank = 0, 0.0, self._launch.rank
        while not self._stop:
            self._check_launcher(directory)
            try:
                for other, code in peers.wait(_IDLE if self._task is None else _BUSY).items():
                    if self.gone.get(other) is None and not self._has_left(store, other):
                        self.gone[other] = (how_it_ended(other, code), code)
                if several_machines and time.monotonic() > beat + BEAT:
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
