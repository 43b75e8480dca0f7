"""The group of launched processes: membership, values that all gather at the same points, and ranks that one leads.

Each rank runs the same tests by itself. They gather values at the same points, one test an epoch: `begin`, any number
of `gather`, `end`. A rank that fails early goes to `end` at once; a rank that waits for it in a gathering then raises,
and all are in step again in the next epoch. Every wait has a deadline, and names the ranks that did not come.

The process of rank 0 is the leader of worlds, too, and the others follow it in a thread. What needs ranks has them in
worlds, so that these processes outlive whatever becomes of a rank.

This module is light: it imports torch only when a session is joined.
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
from ddpcheck.findings.wording import agreeing, format_ranks
from ddpcheck.worlds.launchers.detection import BY_HAND, LauncherEnv
from ddpcheck.worlds.launchers.follower import Follower
from ddpcheck.worlds.launchers.leader import Leader
from ddpcheck.worlds.launchers.rendezvous import how_it_ended
from ddpcheck.worlds.launchers.store import StoreGoneError, open_store
from ddpcheck.worlds.waiting import wait_until
from ddpcheck.worlds.wire import NO_LAUNCH

_AFTERMATH = 0.5  # for the reason why the launcher ends us to show
_LOOK = 0.25  # seconds between looks at the launcher
_ORPHANED = 5.0  # for this process to end by itself without a launcher


@dataclass(slots=True)
class Epoch:
    """What the ranks do from one `begin` or `end` to the next; `out_of_step` is why this rank gathers no more in it."""

    number: int
    label: str
    steps: int = 0
    out_of_step: str | None = None


class RankGroup:
    """This process as one of the ranks that a launcher has started; one a process.

    Attributes:
        launch: What the launcher said.
        epoch: The one that this rank is in.
        gone: Ranks that have ended without leaving, and how, in words; the leader knows all, the others those that they
            have waited for.
        terminated: When this process was asked to end or lost its launcher, by `time.monotonic()`; `None` before.
        leader: On rank 0, the processes of all ranks, for worlds; `None` on the others, which follow.
        broken: Why the ranks cannot work together any more, in a sentence; `None` as long as they can.
    """

    def __init__(self, launch: LauncherEnv, *, timeout: float = 120.0) -> None:
        """Meet the other ranks.

        Raises:
            UsageError: Nothing tells where the ranks could meet.
            HangError: A rank did not come.
            DDPCheckError: The ranks cannot reach each other.
        """
        self.launch = launch
        self.rank = launch.rank
        self.world_size = launch.world_size
        self.broken: str | None = None
        self.gone: dict[int, str] = {}
        self.terminated: float | None = None
        self.leader: Leader | None = None
        self.epoch = Epoch(0, "the start")
        self._owner = os.getpid()
        self._written: list[str] = []  # names of the last two gatherings
        self._busy = False
        self._left = self._announced = False
        self._released = threading.Event()
        self._following: Callable[[], bool] = lambda: False  # whether rank 0 leads this one
        self.store, met = open_store(launch, timeout)
        try:
            self.gather("the start of the session", None, timeout=timeout)
        finally:
            met()  # a rank that is not there yet has no time left
        threading.Thread(target=self._watch_launcher, args=(os.getppid(),), daemon=True).start()
        if self.rank == 0:
            self.leader = Leader(launch, timeout=timeout, store=self.store, on_lost=self._note_lost)
        else:
            follower = Follower(launch, timeout=timeout, store=self.store)
            thread = threading.Thread(target=self._follow, args=(follower,), daemon=True)
            thread.start()
            self._following = thread.is_alive
            if not launch.agent:  # a store that has ended is not asked: torch writes a page each time
                self.store.kept = self._following
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_terminate)
        os.environ[NO_LAUNCH] = str(self._owner)
        atexit.register(self.leave, "its process ended", timeout=1.0)

    # --- In threads of their own --------------------------------------------------------------------------------------

    def _note_lost(self, rank: int, pid: int | None) -> None:
        """The leader has lost the connection to a rank."""
        with contextlib.suppress(StoreGoneError):
            if not self._released.is_set() and not self.store.has(f"left/{rank}"):
                self.gone[rank] = how_it_ended(rank, pid)
                self.store.put(f"gone/{rank}", self.gone[rank].encode())

    def _follow(self, follower: Follower) -> None:
        if not follower.serve() and not self._left:
            self.gone[0] = how_it_ended(0, follower.welcome.pid if follower.welcome.shared else None)

    def _watch_launcher(self, launcher: int) -> None:
        """End this process where its launcher has been killed: nobody else would, should it be stuck."""
        while os.getppid() == launcher or self.launch.launcher == BY_HAND:
            if self._released.wait(_LOOK):
                return
        self.terminated = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._released.wait(_ORPHANED):
            os._exit(128 + signal.SIGTERM)

    # --- Gathering --------------------------------------------------------------------------------------------------

    def begin(self, label: str) -> None:
        """Begin an epoch, a test for example; every rank begins the same ones in the same order."""
        self.epoch = Epoch(self.epoch.number + 1, label)
        with contextlib.suppress(StoreGoneError):
            self.store.put(f"at/{self.rank}", label.encode())

    def gather(self, what: str, value: object, *, timeout: float) -> list[Any]:
        """Give every rank a value that can be pickled, and return the value of each, in order of rank.

        `what` is the point at which every rank does so, in words that are the same on all of them.

        Raises:
            HangError: A rank did not get there in time.
            RankError: A rank has ended, has left, or is at another point.
        """
        self._check()
        if self.epoch.out_of_step is not None:
            raise RankError(self.epoch.out_of_step)
        self.epoch.steps += 1
        try:
            return self._gather(f"{self.epoch.number}/{self.epoch.steps}", what, value, timeout)
        except (RankError, HangError) as error:
            self.epoch.out_of_step = str(error)
            raise

    def end(self, value: object, *, timeout: float) -> list[Any]:
        """End the epoch that `begin` has begun: `gather`, for ranks that are out of step too.

        A rank that does not come in time is lost: the session is broken.
        """
        self._check()
        self.epoch.out_of_step = None
        try:
            found = self._gather(f"{self.epoch.number}/end", "the end", value, timeout)
        except HangError as error:
            self.mark_broken(str(error))
            raise
        self.epoch = Epoch(self.epoch.number + 1, f"what follows {self.epoch.label}")
        return found

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """A block that ends by itself where the launcher ends this process: it says what happened."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def _gather(self, name: str, what: str, value: object, timeout: float) -> list[Any]:
        names = {rank: f"gather/{name}/{rank}" for rank in range(self.world_size)}
        try:
            with self.working():
                self.store.put(names[self.rank], pickle.dumps((what, value)))
                self._await(what, names, timeout)
                found = [pickle.loads(self.store.get(each)) for each in names.values()]
        except StoreGoneError as error:
            raise self._lost_store() from error
        self._written.append(names[self.rank])
        if len(self._written) > 2:  # every rank that comes to a gathering after the next one has read it
            with contextlib.suppress(StoreGoneError):
                self.store.remove(self._written.pop(0))
        self.check_in_step([at for at, _ in found])
        return [each for _, each in found]

    def check_in_step(self, points: Sequence[str]) -> None:
        """Refuse to go on where the ranks, in order, are at different points of the program."""
        if len(set(points)) > 1:
            said = "; ".join(f"rank {rank} is at {point}" for rank, point in enumerate(points))
            raise RankError(
                f"The ranks are not in step in {self.epoch.label}: {said}; "
                "every rank must do the same things in the same order."
            )

    def _await(self, what: str, names: dict[int, str], timeout: float) -> None:
        """Wait until all of these are there."""

        def came(rank: int) -> bool:
            """Asked once a rank is known to have gone on: since it was missing, it may have been here before that."""
            return self.store.has(names[rank])

        def check(missing: list[int]) -> None:
            if missing and (reason := self.why_not(missing, came)):
                raise RankError(reason)
            ended = [rank for rank in missing if self.store.has(f"gather/{self.epoch.number}/end/{rank}")]
            if what != "the end" and (ended := [rank for rank in ended if not came(rank)]):
                raise RankError(
                    f"{format_ranks(ended).capitalize()} {agreeing('has', ended)} left {self.epoch.label} already, "
                    f"while rank {self.rank} waits in {what}."
                )

        if late := self.store.wait_for(names, time.monotonic() + timeout, check):
            who = format_ranks(late).capitalize()
            raise HangError(f"{who} did not reach {what} of {self.epoch.label} within {timeout:g} s{self._last(late)}.")

    def _last(self, ranks: Sequence[int]) -> str:
        said = []
        for rank in ranks:
            if self.store.has(f"at/{rank}"):
                said.append(f"rank {rank} was last in {self.store.get(f'at/{rank}').decode()}")
        return "; " + ", ".join(said) if said else ""

    # --- Others that are not there any more ------------------------------------------------------------------------

    def _check(self) -> None:
        if self._owner != os.getpid():
            raise DDPCheckError("The session of a launcher's ranks belongs to the process that joined it.")
        if self._left:
            raise DDPCheckError("This rank has left the session.")
        if self.broken is not None:
            raise RankError(self.broken)

    def mark_broken(self, sentence: str) -> str:
        """Take note why the ranks cannot work together any more; return the first such reason, as `broken` has it."""
        if self.broken is None:
            self.broken = f"The ranks cannot work together any more, since {self.epoch.label}: {sentence}"
        return self.broken

    def why_not(self, ranks: Sequence[int], came: Callable[[int], bool] = lambda rank: False) -> str | None:
        """Why some of these will never come, of those that had not before they ended; breaks the session."""
        try:
            for rank in ranks:
                if rank not in self.gone and self.store.has(f"gone/{rank}"):
                    self.gone[rank] = self.store.get(f"gone/{rank}").decode()
            if gone := [self.gone[rank] for rank in ranks if rank in self.gone and not came(rank)]:
                return self.mark_broken("; ".join(gone) + ".")
            if left := [rank for rank in ranks if self.store.has(f"left/{rank}") and not came(rank)]:
                said = [f"rank {rank} has left ({self.store.get(f'left/{rank}').decode()})" for rank in left]
                return self.mark_broken("; ".join(said) + ".")
        except StoreGoneError:
            return str(self._lost_store())
        if self.terminated is not None and time.monotonic() > self.terminated + _AFTERMATH:
            return self.mark_broken(f"{self.launch.launcher} has told rank {self.rank} to end.")
        return None

    def _lost_store(self) -> RankError:
        """The exception for a store that does not answer: its keeper has ended, which as a rule is seen soon."""
        wait_until(lambda: self.gone, _AFTERMATH)
        if self.gone:
            return RankError(self.mark_broken("; ".join(self.gone.values()) + "."))
        keeper = self.launch.launcher if self.launch.agent else "rank 0"
        return RankError(self.mark_broken(f"the store that {keeper} keeps does not answer any more."))

    # --- Leaving ---------------------------------------------------------------------------------------------------

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        """Survive long enough to say what happened: launchers end all ranks as soon as one of them has died."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # who means it asks twice
        self.terminated = time.monotonic()
        if not self._busy and self.broken is None:
            self.mark_broken(f"{self.launch.launcher} has told rank {self.rank} to end.")
            raise KeyboardInterrupt(self.broken)

    def announce(self, reason: str) -> None:
        """Say that this rank comes to no more gatherings; `reason` completes "rank 1 has left (...)"."""
        if not self._announced and self._owner == os.getpid():
            self._announced = True
            with contextlib.suppress(StoreGoneError):
                self.store.put(f"left/{self.rank}", reason.encode())

    def leave(self, reason: str = "it has finished", *, timeout: float = 60.0) -> None:
        """Say that this rank is going, so that no other waits for it; may be called again.

        Rank 0 goes first, for its words are those that people read, and launchers end all ranks as soon as one has
        ended with an error: the others wait until it has left, or until the deadline. Where it keeps the store, it
        waits until they say so, for they may still read what all have gathered last. `reason` is as of `announce`.
        """
        if self._left or self._owner != os.getpid():
            return
        self._left = True
        awaited = self._following if self.rank else self._any_reads
        if self.rank == 0 and (self.launch.agent or self._announced or self.broken is not None):
            timeout = 0.0  # nobody reads here, or the ranks do not end together
        try:
            self.announce(reason)
            wait_until(lambda: not awaited() or self.terminated is not None, timeout)
        finally:
            self._release()

    def _any_reads(self) -> bool:
        """On rank 0: whether another rank has not come to its end yet."""
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
