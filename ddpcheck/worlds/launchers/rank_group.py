"""The group of launched ranks: membership, and values that all ranks gather at the same points.

Each rank runs the same tests by itself. They gather values at the same points, one test an epoch: `begin`, any number
of `gather`, `end`. A rank that fails early goes to `end` at once; a rank that waits for it in a gathering then raises,
and all are in step again in the next epoch. Every wait has a deadline, and names the ranks that did not come.

This module is light: it imports torch only when a session is joined.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ddpcheck.findings.errors import DdpcheckError, HangError, RankError
from ddpcheck.findings.wording import agreeing, format_ranks
from ddpcheck.worlds.launchers.detection import LauncherEnv
from ddpcheck.worlds.launchers.interface import gloo_interface, route
from ddpcheck.worlds.launchers.liveness import Peer, PeerWatch, this_machine
from ddpcheck.worlds.launchers.store import StoreGoneError, open_store
from ddpcheck.worlds.wire import NO_LAUNCH

_PAUSE = 0.01
_AFTERMATH = 0.5  # for the reason why the launcher ends us to show


@dataclass(slots=True)
class Epoch:
    """What the ranks do from one `begin` or `end` to the next; `out_of_step` is why this rank gathers no more in it."""

    number: int
    label: str
    steps: int = 0
    worlds: int = 0
    out_of_step: str | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where this rank is among the others.

    Attributes:
        local_rank: Among those of its machine.
        first_here: Whether it is the first of them, which removes their directory.
        one_machine: Whether all ranks are on this machine.
        interface: Of the network, that gloo must be told of; empty where it finds one by itself.
        directory: That the ranks of this machine share.
    """

    local_rank: int
    first_here: bool
    one_machine: bool
    interface: str
    directory: Path


class RankGroup:
    """This process as one of the ranks that a launcher has started; one a process.

    Attributes:
        launch: What the launcher said.
        epoch: The one that this rank is in.
        placement: Where this rank is among the others.
        watch: Of the other ranks.
        broken: Why the ranks cannot work together any more, in a sentence; `None` as long as they can.
    """

    def __init__(self, launch: LauncherEnv, *, timeout: float = 120.0) -> None:
        """Meet the other ranks.

        Raises:
            UsageError: Nothing tells where the ranks could meet.
            HangError: A rank did not come.
            DdpcheckError: The ranks cannot reach each other.
        """
        self.launch = launch
        self.rank = launch.rank
        self.world_size = launch.world_size
        self.broken: str | None = None
        self.watch = PeerWatch(launch)
        self.epoch = Epoch(0, "the start")
        self._owner = os.getpid()
        self._clean_ups: list[list[Callable[[], None]]] = [[], []]
        self._busy = False
        self._left = self._announced = False
        self.store, met = open_store(launch, timeout)
        try:
            self.placement, members = self._meet(timeout)
        finally:
            met()  # a rank that is not there yet has no time left
        self.watch.start(members, self.store, self.placement.directory, on_bug=self.mark_broken)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_terminate)
        os.environ[NO_LAUNCH] = str(self._owner)
        atexit.register(self._at_exit)

    def _meet(self, timeout: float) -> tuple[Placement, dict[int, Peer]]:
        own, master = route(*self.store.address)
        offered = tempfile.mkdtemp(prefix="ddpcheck-launched-")
        me = (Peer(this_machine(), os.getpid()), offered, master)
        try:
            peers: list[tuple[Peer, str, str]] = self.gather("the start of the session", me, timeout=timeout)
        except BaseException:
            shutil.rmtree(offered, ignore_errors=True)
            raise
        here = [rank for rank, (peer, *_) in enumerate(peers) if peer.machine == me[0].machine]
        one_machine = len(here) == self.world_size
        placement = Placement(
            here.index(self.rank) if self.launch.local_rank is None else self.launch.local_rank,
            here[0] == self.rank,
            one_machine,
            gloo_interface(one_machine, own, [theirs for *_, theirs in peers]),
            Path(peers[here[0]][1]),
        )
        if not placement.first_here:
            os.rmdir(offered)
        return placement, {rank: peer for rank, (peer, *_) in enumerate(peers)}

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
            return self._gather(self.point, what, value, timeout)
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

    def name_world(self) -> str:
        """A name for one more world: the same on every rank as long as they are in step."""
        self.epoch.worlds += 1
        return f"world{self.epoch.number}-{self.epoch.worlds}"

    @property
    def point(self) -> str:
        """A name for where this rank is, the same for ranks in step, and never the same again."""
        return f"{self.epoch.number}/{self.epoch.steps}"

    def _gather(self, name: str, what: str, value: object, timeout: float) -> list[Any]:
        names = {rank: f"gather/{name}/{rank}" for rank in range(self.world_size)}
        self._busy = True
        try:
            self.store.put(names[self.rank], pickle.dumps((what, value)))
            self._await(what, names, timeout)
            found = [pickle.loads(self.store.get(each)) for each in names.values()]
        except StoreGoneError as error:
            raise self.lost_store(error) from error
        finally:
            self._busy = False
        for clean_up in self._clean_ups.pop(0):
            with contextlib.suppress(OSError, StoreGoneError):
                clean_up()
        # Every rank that comes to a gathering after the next one has read it.
        self._clean_ups.append([lambda: self.store.remove(names[self.rank])])
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

        def check(missing: list[int]) -> None:
            if missing and (reason := self._why_not(missing)):
                raise RankError(reason)
            ended = [rank for rank in missing if self.store.has(f"gather/{self.epoch.number}/end/{rank}")]
            # A rank may have been here before it ended.
            if what != "the end" and (ended := [rank for rank in ended if not self.store.has(names[rank])]):
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

    def clean_up_later(self, clean_up: Callable[[], None]) -> None:
        """Call `clean_up` as soon as every rank has come to two more gatherings."""
        self._clean_ups[-1].append(clean_up)

    # --- Others that are not there any more ------------------------------------------------------------------------

    def _check(self) -> None:
        if self._owner != os.getpid():
            raise DdpcheckError("The session of a launcher's ranks belongs to the process that joined it.")
        if self._left:
            raise DdpcheckError("This rank has left the session.")
        if self.broken is not None:
            raise RankError(self.broken)

    def mark_broken(self, sentence: str) -> str:
        """Take note why the ranks cannot work together any more; return the first such reason, as `broken` has it."""
        if self.broken is None:
            self.broken = f"The ranks cannot work together any more, since {self.epoch.label}: {sentence}"
        return self.broken

    def _why_not(self, ranks: Sequence[int]) -> str | None:
        """Why some of these will never come; breaks the session."""
        gone = [rank for rank in ranks if rank in self.watch.gone]
        if gone:
            return self.mark_broken("; ".join(self.watch.gone[rank][0] for rank in gone) + ".")
        left = [rank for rank in ranks if self.store.has(f"left/{rank}")]
        if left:
            said = [f"rank {rank} has left ({self.store.get(f'left/{rank}').decode()})" for rank in left]
            return self.mark_broken("; ".join(said) + ".")
        if self.watch.terminated is not None and time.monotonic() > self.watch.terminated + _AFTERMATH:
            return self.mark_broken(f"{self.launch.launcher} has told rank {self.rank} to end.")
        return None

    def lost_store(self, error: StoreGoneError) -> RankError:
        """The exception for a store that does not answer: its keeper has ended, which as a rule is seen soon."""
        deadline = time.monotonic() + _AFTERMATH
        while self.watch.started and not self.watch.gone and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        if self.watch.gone:
            return RankError(self.mark_broken("; ".join(said for said, _ in self.watch.gone.values()) + "."))
        keeper = self.launch.launcher if self.launch.agent else "rank 0"
        return RankError(self.mark_broken(f"the store that {keeper} keeps does not answer any more."))

    @contextlib.contextmanager
    def attended(self, task: Callable[[], None]) -> Any:
        """Have the watching thread call `task` many times a second."""
        self._busy = True
        try:
            with self.watch.calling(task):
                yield
        finally:
            self._busy = False

    # --- Leaving ---------------------------------------------------------------------------------------------------

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        """Survive long enough to say what happened: launchers end all ranks as soon as one of them has died."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # who means it asks twice
        self.watch.terminated = time.monotonic()
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
        ended with an error: the others wait until it has left, or until the deadline. `reason` is as of `announce`.
        """
        if self._left or self._owner != os.getpid():
            return
        self._left = True
        try:
            self.announce(reason)
            others = [rank for rank in range(self.world_size) if rank != self.rank]
            if self.rank:
                self._linger([0], "left", timeout)
                self.store.put(f"seen/{self.rank}", b"")
            elif not self.launch.agent:
                self._linger([rank for rank in others if self.store.has(f"left/{rank}")], "seen", min(timeout, 5.0))
        except StoreGoneError:
            pass
        finally:
            self._release()

    def _linger(self, ranks: Sequence[int], name: str, timeout: float) -> None:
        """Wait for these to have written this, as far as they still exist."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self.watch.terminated is None:
            if all(rank in self.watch.gone or self.store.has(f"{name}/{rank}") for rank in ranks):
                return
            time.sleep(_PAUSE)

    def _release(self) -> None:
        self.watch.stop()
        with contextlib.suppress(ValueError):  # not in the main thread
            if signal.getsignal(signal.SIGTERM) == self._on_terminate:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.pop(NO_LAUNCH, None)
        atexit.unregister(self._at_exit)
        if self.placement.first_here or self.broken:
            shutil.rmtree(self.placement.directory, ignore_errors=True)

    def _at_exit(self) -> None:
        self.leave("its process ended", timeout=1.0)
