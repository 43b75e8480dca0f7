"""The ranks of one world as processes: started, spoken to, listened to, killed. Judges nothing."""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpcheck.worlds import starting, wire
from ddpcheck.worlds.waiting import ask_for_stacks, file_size

_LAST_WORDS = 0.5  # for a stack to be dumped
_FROM_AFAR = 2.0  # and to come here from another machine
_QUIET = 0.004  # without more of it
_DEATH = 2.0  # for processes to end, told or killed
_POLL = 0.01  # where processes have to be asked whether they have ended


@dataclass(slots=True)
class Rank:
    """One rank, as the parent sees it."""

    number: int
    sock: socket.socket
    inbox: wire.Inbox = field(default_factory=wire.Inbox)
    outbox: wire.Outbox = field(default_factory=wire.Outbox)
    launch: starting.StartedRanks | None = None
    pid: int | None = None
    ready: float | None = None
    connected: bool = True
    ended: tuple[int | None, float] | None = None  # exit code where it is known, when
    answer: tuple[str, Any] | None = None  # to the run under way
    failing: Any = None  # what it has told of its failure before its answer


class RankProcesses:
    """The ranks of one world."""

    def __init__(self, directory: Path, *, one_machine: bool = True) -> None:
        self.ranks: list[Rank] = []
        self.run = 0  # number of the one under way; replies to an earlier one are dropped
        self.group_resets = 0  # how often they have been asked for another process group
        self.born = time.monotonic()  # when they were asked to become ready
        self.error = ""  # why no rank can go on
        self.refused = False  # whether that is because of what the world was asked to be
        self.one_machine = one_machine  # whether the processes of the ranks can be seen from here
        self._directory = directory
        self._launches: list[starting.StartedRanks] = []  # one for each hash seed and way of starting
        self._selector = selectors.DefaultSelector()
        self.sent_off = False  # whether they have been told that it is over

    def start(
        self,
        configs: Sequence[wire.RankConfig],
        starters: Sequence[starting.Starter],
        hash_seeds: Sequence[str],
        ahead: bool,
    ) -> None:
        """Start the processes, each in its way with its hash seed, and tell each what it is, without waiting for them.

        Where they are made `ahead` of their use, they may start later than others that are not. An `OSError` says that
        the system has no room for them.
        """
        theirs = []
        try:
            for config in configs:
                ours, other = socket.socketpair()
                theirs.append(other)
                ours.setblocking(False)
                rank = Rank(config.rank, ours)
                self.ranks.append(rank)
                self._selector.register(ours, selectors.EVENT_READ, rank)
            ways = list(zip(starters, hash_seeds, strict=True))
            for start, seed in dict.fromkeys(ways):
                fds = {rank: end.fileno() for rank, end in enumerate(theirs) if ways[rank] == (start, seed)}
                self._launches.append(start(str(self._directory), fds, seed, configs[0].preload, ahead))
                for number in fds:
                    self.ranks[number].launch = self._launches[-1]
        finally:
            for other in theirs:
                other.close()
        for started in self._launches:
            if started.channel is not None:
                self._selector.register(started.channel, selectors.EVENT_READ, None)
        for rank, config in zip(self.ranks, configs, strict=True):
            self.post(rank, wire.pack(("config", config)))

    @property
    def ready(self) -> bool:
        """Whether every rank is known to have its process group."""
        return all(rank.ready is not None for rank in self.ranks)

    @property
    def server_owes(self) -> tuple[float, str]:
        """Since when a fork server has not answered, and that in words; infinite if none owes an answer."""
        owing = (launch.server_owes for launch in self._launches if isinstance(launch, starting.ForkedRanks))
        return min(owing, default=(math.inf, ""))

    @property
    def has_failed(self) -> bool:
        """Whether something is known to have gone wrong."""
        answers = [rank.answer[0] for rank in self.ranks if rank.answer is not None]
        return bool(self.error) or "failure" in answers or any(rank.ended is not None for rank in self.ranks)

    @property
    def has_lost_one(self) -> bool:
        """Whether a rank says nothing any more, and how it has ended is not known yet."""
        return any(not rank.connected and rank.ended is None for rank in self.ranks)

    @property
    def gone(self) -> bool:
        """Whether every rank is known to have ended."""
        return all(rank.ended is not None for rank in self.ranks)

    def update_context(self, context: wire.ProcessContext) -> None:
        """Tell the ranks what is around them from now on."""
        self._post_all(wire.pack(("context", context)))
        if not self.ready:
            self.born = time.monotonic()

    def reset_process_group(self) -> None:
        """Ask the ranks for another process group, without waiting for it."""
        self.group_resets += 1
        self.born = time.monotonic()
        for rank in self.ranks:
            rank.ready = None
        self._post_all(wire.pack(("reset_process_group",)))

    # --- Sending and receiving ---------------------------------------------------------------------------------

    def _post_all(self, data: bytes) -> None:
        for rank in self.ranks:
            self.post(rank, data)

    def post(self, rank: Rank, data: bytes) -> None:
        """Send a packed message to a rank; what does not fit its socket now goes with the next `poll`."""
        if rank.connected:
            rank.outbox.send(rank.sock, data)
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if rank.outbox else 0)
            self._selector.modify(rank.sock, wanted, rank)

    def poll(self, seconds: float) -> None:
        """Wait for something to happen, and take note of it."""
        if any(launch.channel is None for launch in self._launches):
            seconds = min(seconds, _POLL)
        for key, mask in self._selector.select(max(0.0, seconds)):
            rank = key.data
            if rank is None:
                continue  # the launch, below
            if mask & selectors.EVENT_WRITE:
                self.post(rank, b"")
            if mask & selectors.EVENT_READ:
                self._read_rank(rank)
        for launch in self._launches:
            for event in launch.events():
                self._note(event)
            channel = launch.channel
            if launch.over and channel is not None and channel in self._selector.get_map():
                self._selector.unregister(channel)

    def _read_rank(self, rank: Rank) -> None:
        if not rank.connected:
            return
        messages, alive = rank.inbox.drain(rank.sock)
        for kind, *rest in messages:
            if kind == "ready":
                if rest[1] == self.group_resets:
                    rank.ready = rest[0]
            elif kind == "failing":
                rank.failing = rest[1] if rest[0] == self.run else None
            elif rest[0] in (0, self.run):  # 0: it failed while starting up
                rank.answer = (kind, rest[1])
        if not alive:
            rank.connected = False
            self._selector.unregister(rank.sock)

    def _note(self, event: starting.Event) -> None:
        if event[0] == "forked":
            for number, pid in event[1]:
                self.ranks[number].pid = pid
        elif event[0] == "exit":
            rank = self.ranks[event[1]]
            self._read_rank(rank)  # its last words come before its death
            rank.ended = (event[2], event[3])
        else:
            self.error = event[1]
            self.refused = event[0] == "refused"

    # --- Ending ------------------------------------------------------------------------------------------------

    def dump_stacks(self, everyone: bool = False) -> dict[int, str]:
        """Have every rank that is still at work, or `everyone`, write its stack, and return what they wrote."""
        self.poll(0)
        living = [rank for rank in self.ranks if rank.ended is None and rank.pid is not None]
        busy = [rank.number for rank in living if everyone or rank.answer is None]
        if not busy:
            return {}
        files = [self.path(number, "stack") for number in busy]
        seconds = _LAST_WORDS if self.one_machine else _FROM_AFAR
        ask_for_stacks(files, lambda: self._signal(busy, signal.SIGUSR1), seconds, _QUIET)
        self.poll(0)  # one may have finished after all
        return {number: self.read(number, "stack") for number in busy if everyone or self.ranks[number].answer is None}

    def kill(self) -> None:
        """Kill every rank and wait until they are dead."""
        self._signal([rank.number for rank in self.ranks if rank.ended is None], signal.SIGKILL)
        self._await_ends()

    def _signal(self, ranks: Sequence[int], number: signal.Signals) -> None:
        for launch in self._launches:
            if theirs := [rank for rank in ranks if self.ranks[rank].launch is launch]:
                launch.signal(theirs, number)

    def _await_ends(self) -> bool:
        deadline = time.monotonic() + _DEATH
        while awaited := [rank.launch for rank in self.ranks if rank.ended is None]:
            left = deadline - time.monotonic()
            if left <= 0 or all(launch is None or launch.over for launch in awaited):
                return False
            self.poll(left)
        return True

    def request_exit(self, idle: bool) -> None:
        """Tell every rank that it is over, without waiting: those that are idle are asked to go, others are killed."""
        if self.sent_off:
            return
        self.sent_off = True
        self.poll(0)
        if idle and self.ready:
            self._post_all(wire.pack(("close",)))
        else:
            self._signal([rank.number for rank in self.ranks if rank.ended is None], signal.SIGKILL)

    def terminate(self, idle: bool) -> None:
        """End every rank, and wait until that is so."""
        self.request_exit(idle)
        if not self._await_ends():
            self.kill()

    def release(self, ours: bool) -> None:
        """Let go of every descriptor; in a fork of our process (`ours` false) touch nothing but those."""
        for rank in self.ranks:
            rank.sock.close()
        self._selector.close()
        if ours:
            for launch in self._launches:
                launch.close()

    # --- Files -------------------------------------------------------------------------------------------------

    def path(self, rank: int, kind: str) -> Path:
        """Return the file of a rank: `out`, `stack`, `slots` or `attachment`."""
        return self._directory / f"rank{rank}.{kind}"

    def read(self, rank: int, kind: str) -> str:
        """Return the text in a file of a rank, `""` when there is none."""
        return self.read_bytes(rank, kind).decode("utf-8", "replace")

    def read_bytes(self, rank: int, kind: str) -> bytes:
        """Return what is in a file of a rank, `b""` when there is none."""
        try:
            return self.path(rank, kind).read_bytes()
        except OSError:
            return b""

    def forget_files(self) -> None:
        """Empty what the ranks have written for the parent so far; they go on at the beginning."""
        for rank in self.ranks:
            for kind in ("out", "stack"):
                if file_size(path := self.path(rank.number, kind)):
                    os.truncate(path, 0)
            self.path(rank.number, "attachment").unlink(missing_ok=True)
        if self.group_resets > 1:  # the group before the one before this is over everywhere
            (self._directory / f"store{self.group_resets - 2 or ''}").unlink(missing_ok=True)
