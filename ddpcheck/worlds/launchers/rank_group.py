"""Group of launched processes: membership, all-gather, lost ranks. Joining imports torch, if needed.

Each rank runs the same tests and gathers values at the same points, one epoch per test: `begin`, any number of
`gather`, `end`. A rank that fails early goes directly to `end`; a rank waiting in `gather` then raises, and all ranks
are synchronized in the next epoch. Rank 0 also leads worlds, which the other ranks follow in a thread: the launched
processes survive a failed rank.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ddpcheck.findings.errors import DDPCheckError, HangError, RankError
from ddpcheck.findings.wording import format_ranks, pluralize_verb
from ddpcheck.worlds.launchers.detection import BY_HAND, LauncherEnv
from ddpcheck.worlds.launchers.leader import Follower, Leader
from ddpcheck.worlds.launchers.rendezvous import describe_exit
from ddpcheck.worlds.launchers.store import StoreGoneError, open_store
from ddpcheck.worlds.starting import wait_until
from ddpcheck.worlds.wire import NO_LAUNCH

_AFTERMATH = 0.5  # seconds to learn why the launcher terminates this process
_LOOK = 0.25  # seconds between checks of the launcher process
_ORPHANED = 5.0  # seconds until a process without a launcher is forced to exit


@dataclass(slots=True)
class Epoch:
    """Section of the program, such as one test, that all ranks begin in order."""

    number: int
    label: str
    steps: int = 0
    out_of_step: str | None = None  # reason with which `gather` raises on this rank


class RankGroup:
    """This process as one rank of a launch; one instance per process.

    Attributes:
        launch: Environment set by the launcher.
        epoch: Current epoch of this rank.
        gone: Rank -> message, for ranks that exited without `leave`; complete on the leader, elsewhere only the ranks
            that this rank has waited for.
        terminated: `time.monotonic()` at SIGTERM or at loss of the launcher; `None` if neither has happened.
        leader: Leader of worlds on rank 0; `None` on other ranks.
        broken: Reason why the ranks can no longer synchronize, or `None`.
    """

    def __init__(self, launch: LauncherEnv, *, timeout: float = 120.0) -> None:
        """Rendezvous with the other ranks; raises like `open_store`, and `HangError` for late ranks."""
        self.launch = launch
        self.rank = launch.rank
        self.world_size = launch.world_size
        self.broken: str | None = None
        self.gone: dict[int, str] = {}
        self.terminated: float | None = None
        self.leader: Leader | None = None
        self.epoch = Epoch(0, "the start")
        self._owner = os.getpid()
        self._written_keys: list[str] = []  # keys written by the last two `gather` calls
        self._is_working = False
        self._has_left = self._announced = False
        self._released = threading.Event()
        self._is_following: Callable[[], bool] = lambda: False  # True while the follower thread runs
        self.store, close_file = open_store(launch, timeout)
        try:
            self.gather("the start of the session", None, timeout=timeout)
        finally:
            close_file()  # late ranks have timed out
        threading.Thread(target=self._watch_launcher, args=(os.getppid(),), daemon=True).start()
        if self.rank == 0:
            self.leader = Leader(launch, timeout=timeout, store=self.store, on_lost=self._record_lost_rank)
        else:
            follower = Follower(launch, timeout=timeout, store=self.store)
            thread = threading.Thread(target=self._serve_leader, args=(follower,), daemon=True)
            thread.start()
            self._is_following = thread.is_alive
            if not launch.agent:  # torch prints a long error per request to a dead store
                self.store.is_alive = self._is_following
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_terminate)
        os.environ[NO_LAUNCH] = str(self._owner)
        atexit.register(self.leave, "its process ended", timeout=1.0)

    # --- Background threads -------------------------------------------------------------------------------------------

    def _record_lost_rank(self, rank: int, pid: int | None) -> None:
        with contextlib.suppress(StoreGoneError):
            if not self._released.is_set() and not self.store.has(f"left/{rank}"):
                self.gone[rank] = describe_exit(rank, pid)
                self.store.put(f"gone/{rank}", self.gone[rank].encode())

    def _serve_leader(self, follower: Follower) -> None:
        if not follower.serve() and not self._has_left:
            self.gone[0] = describe_exit(0, follower.welcome.pid if follower.welcome.shared else None)

    def _watch_launcher(self, launcher: int) -> None:
        """Terminate this process when its launcher has exited, even if this process hangs."""
        while os.getppid() == launcher or self.launch.launcher == BY_HAND:
            if self._released.wait(_LOOK):
                return
        self.terminated = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._released.wait(_ORPHANED):
            os._exit(128 + signal.SIGTERM)

    # --- Gathering --------------------------------------------------------------------------------------------------

    def begin(self, label: str) -> None:
        """Begin the epoch `label`, such as a test; ranks begin epochs in equal order."""
        self.epoch = Epoch(self.epoch.number + 1, label)
        with contextlib.suppress(StoreGoneError):
            self.store.put(f"at/{self.rank}", label.encode())

    def gather(self, what: str, value: object, *, timeout: float) -> list[Any]:
        """All-gather a picklable value; return the values in rank order.

        `what` describes this point of the program; it must be equal on all ranks. Raises `HangError` if a rank did not
        call `gather` in time, and `RankError` if a rank exited, left, or is at a different point.
        """
        self._raise_if_unusable()
        if self.epoch.out_of_step is not None:
            raise RankError(self.epoch.out_of_step)
        self.epoch.steps += 1
        try:
            return self._gather(f"{self.epoch.number}/{self.epoch.steps}", what, value, timeout)
        except (RankError, HangError) as error:
            self.epoch.out_of_step = str(error)
            raise

    def end(self, value: object, *, timeout: float) -> list[Any]:
        """End the epoch with a `gather`, even on ranks whose earlier `gather` raised.

        After a timeout, the group is `broken`: no later `gather` is possible.
        """
        self._raise_if_unusable()
        self.epoch.out_of_step = None
        try:
            values = self._gather(f"{self.epoch.number}/end", "the end", value, timeout)
        except HangError as error:
            self.mark_broken(str(error))
            raise
        self.epoch = Epoch(self.epoch.number + 1, f"what follows {self.epoch.label}")
        return values

    @contextlib.contextmanager
    def without_interrupt(self) -> Iterator[None]:
        """Keep SIGTERM from raising KeyboardInterrupt in a block that raises a clearer error."""
        before, self._is_working = self._is_working, True
        try:
            yield
        finally:
            self._is_working = before

    def _gather(self, name: str, what: str, value: object, timeout: float) -> list[Any]:
        names = {rank: f"gather/{name}/{rank}" for rank in range(self.world_size)}
        try:
            with self.without_interrupt():
                self.store.put(names[self.rank], pickle.dumps((what, value)))
                self._wait_for_keys(what, names, timeout)
                entries = [pickle.loads(self.store.get(key)) for key in names.values()]
        except StoreGoneError as error:
            raise self._store_error() from error
        self._written_keys.append(names[self.rank])
        if len(self._written_keys) > 2:  # two gathers later, every rank has read the value
            with contextlib.suppress(StoreGoneError):
                self.store.remove(self._written_keys.pop(0))
        self.require_same_point([point for point, _ in entries])
        return [result for _, result in entries]

    def require_same_point(self, points: Sequence[str]) -> None:
        """Raise `RankError` if the ranks are at different points of the program."""
        if len(set(points)) > 1:
            positions = "; ".join(f"rank {rank} is at {point}" for rank, point in enumerate(points))
            raise RankError(
                f"The ranks are not in step in {self.epoch.label}: {positions}; "
                "every rank must do the same things in the same order."
            )

    def _wait_for_keys(self, what: str, names: dict[int, str], timeout: float) -> None:
        def has_arrived(rank: int) -> bool:
            return self.store.has(names[rank])

        def check(missing: list[int]) -> None:
            if missing and (reason := self.reason_of_absence(missing, has_arrived)):
                raise RankError(reason)
            ended = [rank for rank in missing if self.store.has(f"gather/{self.epoch.number}/end/{rank}")]
            if what != "the end" and (ended := [rank for rank in ended if not has_arrived(rank)]):
                raise RankError(
                    f"{format_ranks(ended).capitalize()} {pluralize_verb('has', ended)} left {self.epoch.label} "
                    f"already, while rank {self.rank} waits in {what}."
                )

        if late := self.store.wait_for(names, time.monotonic() + timeout, check):
            labels = {rank: self.store.get(f"at/{rank}").decode() for rank in late if self.store.has(f"at/{rank}")}
            positions = ", ".join(f"rank {rank} was last in {label}" for rank, label in labels.items())
            raise HangError(
                f"{format_ranks(late).capitalize()} did not reach {what} of {self.epoch.label} within {timeout:g} s"
                f"{f'; {positions}' if positions else ''}."
            )

    # --- Lost ranks ------------------------------------------------------------------------------------------------

    def _raise_if_unusable(self) -> None:
        if self._owner != os.getpid():
            raise DDPCheckError("The session of a launcher's ranks belongs to the process that joined it.")
        if self._has_left:
            raise DDPCheckError("This rank has left the session.")
        if self.broken is not None:
            raise RankError(self.broken)

    def mark_broken(self, sentence: str) -> str:
        """Record the first reason why ranks cannot synchronize in `broken`, and return `broken`."""
        if self.broken is None:
            self.broken = f"The ranks cannot work together any more, since {self.epoch.label}: {sentence}"
        return self.broken

    def reason_of_absence(
        self, ranks: Sequence[int], has_arrived: Callable[[int], bool] = lambda rank: False
    ) -> str | None:
        """Return why a wait for `ranks` cannot succeed, and set `broken`; else return None.

        A rank for which `has_arrived` returns True is not waited for, even if the rank has exited.
        """
        try:
            for rank in ranks:
                if rank not in self.gone and self.store.has(f"gone/{rank}"):
                    self.gone[rank] = self.store.get(f"gone/{rank}").decode()
            if gone := [self.gone[rank] for rank in ranks if rank in self.gone and not has_arrived(rank)]:
                return self.mark_broken("; ".join(gone) + ".")
            if exited_ranks := [rank for rank in ranks if self.store.has(f"left/{rank}") and not has_arrived(rank)]:
                reasons = [f"rank {rank} has left ({self.store.get(f'left/{rank}').decode()})" for rank in exited_ranks]
                return self.mark_broken("; ".join(reasons) + ".")
        except StoreGoneError:
            return str(self._store_error())
        is_ending = self.terminated is not None and time.monotonic() > self.terminated + _AFTERMATH
        return self._mark_ended_by_launcher() if is_ending else None

    def _mark_ended_by_launcher(self) -> str:
        return self.mark_broken(f"{self.launch.launcher} has told rank {self.rank} to end.")

    def _store_error(self) -> RankError:
        wait_until(lambda: self.gone, _AFTERMATH)
        keeper = self.launch.launcher if self.launch.agent else "rank 0"
        reason = "; ".join(self.gone.values()) or f"the store that {keeper} keeps does not answer any more"
        return RankError(self.mark_broken(f"{reason}."))

    # --- Leaving ---------------------------------------------------------------------------------------------------

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        """Record the time of SIGTERM; raise KeyboardInterrupt unless in `without_interrupt` or broken."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second SIGTERM kills
        self.terminated = time.monotonic()
        if not self._is_working and self.broken is None:
            raise KeyboardInterrupt(self._mark_ended_by_launcher())

    def announce(self, reason: str) -> None:
        """Announce that this rank leaves; `reason` completes "rank 1 has left (...)"."""
        if not self._announced and self._owner == os.getpid():
            self._announced = True
            with contextlib.suppress(StoreGoneError):
                self.store.put(f"left/{self.rank}", reason.encode())

    def leave(self, reason: str = "it has finished", *, timeout: float = 60.0) -> None:
        """Announce that this rank leaves, so that no rank waits for it; idempotent.

        Rank 0 exits first, since its output is the report and launchers kill all ranks after the first error exit: the
        other ranks wait for rank 0 until the timeout. If rank 0 owns the store, it first waits for the announcements
        of the other ranks, which may still read the last gathered values. `reason` as in `announce`.
        """
        if self._has_left or self._owner != os.getpid():
            return
        self._has_left = True
        awaited = self._is_following if self.rank else self._has_remaining_ranks
        if self.rank == 0 and (self.launch.agent or self._announced or self.broken is not None):
            timeout = 0.0  # rank 0 does not own the store, or the ranks do not end together
        try:
            self.announce(reason)
            wait_until(lambda: not awaited() or self.terminated is not None, timeout)
        finally:
            self._release()

    def _has_remaining_ranks(self) -> bool:
        return not all(rank in self.gone or self.store.has(f"left/{rank}") for rank in range(1, self.world_size))

    def _release(self) -> None:
        self._released.set()
        if self.leader is not None:
            self.leader.close()
        with contextlib.suppress(ValueError):  # not in the main thread
            if signal.getsignal(signal.SIGTERM) == self._on_terminate:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.pop(NO_LAUNCH, None)
        atexit.unregister(self.leave)
