"""Rank processes of one world: start, send, receive, kill."""

from __future__ import annotations

import contextlib
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
from ddpcheck.worlds.starting import ask_for_stacks, file_size

_DUMP_SECONDS = 0.5  # seconds for a stack dump
_REMOTE_DUMP_SECONDS = 2.0  # seconds for a stack dump from another machine
_QUIET = 0.004  # seconds without growth after which a dump is complete
_EXIT_SECONDS = 2.0  # seconds for processes to exit after a request or SIGKILL
_POLL = 0.01  # seconds between polls of processes without a channel


@dataclass(slots=True)
class Rank:
    """Parent-side state of one rank."""

    number: int
    sock: socket.socket
    inbox: wire.Inbox = field(default_factory=wire.Inbox)
    outbox: wire.Outbox = field(default_factory=wire.Outbox)
    launch: starting.StartedRanks | None = None
    pid: int | None = None
    ready: float | None = None  # time at which the process group was initialized
    connected: bool = True
    ended: tuple[int | None, float] | None = None  # (exit code if known, time of exit)
    answer: tuple[str, Any] | None = None  # to the current run: (kind, payload)
    failing: Any = None  # failure announced before the answer


class RankProcesses:
    """The ranks of one world."""

    def __init__(self, directory: Path, *, one_machine: bool = True) -> None:
        self.ranks: list[Rank] = []
        self.run = 0  # number of the current run; replies to earlier runs are dropped
        self.group_resets = 0  # process group resets requested so far
        self.started_at = time.monotonic()  # time of the last start, reset or context update
        self.error = ""  # why the ranks cannot continue, or ''
        self.refused = False  # `error` is caused by the options of the world
        self.one_machine = one_machine  # all rank processes are on this machine
        self._directory = directory
        self._launches: list[starting.StartedRanks] = []  # one per hash seed and start method
        self._selector = selectors.DefaultSelector()
        self.exit_requested = False  # exit has been requested

    def start(
        self,
        configs: Sequence[wire.RankConfig],
        starters: Sequence[starting.Starter],
        hash_seeds: Sequence[str],
        ahead: bool,
    ) -> None:
        """Start each rank with its starter and hash seed, without waiting.

        `ahead`: the ranks are not needed yet; worlds that start later may be ready first. Raises `OSError` if out of
        resources.
        """
        with contextlib.ExitStack() as stack:
            fds = []
            for config in configs:
                rank_sock, peer = socket.socketpair()
                fds.append(stack.enter_context(peer).fileno())
                rank_sock.setblocking(False)
                self.ranks.append(Rank(config.rank, rank_sock))
                self._selector.register(rank_sock, selectors.EVENT_READ, self.ranks[-1])
            starts = list(zip(starters, hash_seeds, strict=True))
            for starter, seed in dict.fromkeys(starts):
                start_fds = {rank: fd for rank, fd in enumerate(fds) if starts[rank] == (starter, seed)}
                self._launches.append(starter(str(self._directory), start_fds, seed, configs[0].preload, ahead))
                for number in start_fds:
                    self.ranks[number].launch = self._launches[-1]
        for launch in self._launches:
            if launch.channel is not None:
                self._selector.register(launch.channel, selectors.EVENT_READ, None)
        for rank, config in zip(self.ranks, configs, strict=True):
            self.post(rank, wire.pack(("config", config)))

    @property
    def ready(self) -> bool:
        """True if every rank has reported its process group as initialized."""
        return all(rank.ready is not None for rank in self.ranks)

    @property
    def oldest_fork_request(self) -> tuple[float, str]:
        """Time and description of the oldest unanswered fork request, or (inf, '')."""
        requests = (launch.oldest_fork_request for launch in self._launches if isinstance(launch, starting.ForkedRanks))
        return min(requests, default=(math.inf, ""))

    @property
    def has_failed(self) -> bool:
        """True if a rank has failed or exited, or the ranks cannot continue."""
        has_failure = any(rank.answer is not None and rank.answer[0] == "failure" for rank in self.ranks)
        return bool(self.error) or has_failure or any(rank.ended is not None for rank in self.ranks)

    @property
    def has_exited(self) -> bool:
        return all(rank.ended is not None for rank in self.ranks)

    def update_context(self, context: wire.ProcessContext) -> None:
        """Send the ranks a new environment, working directory and import path."""
        self._post_all("context", context)
        if not self.ready:
            self.started_at = time.monotonic()

    def reset_process_group(self) -> None:
        """Ask ranks to destroy and recreate their default process group; return immediately."""
        self.group_resets += 1
        self.started_at = time.monotonic()
        for rank in self.ranks:
            rank.ready = None
        self._post_all("reset_process_group")

    # --- Sending and receiving ---------------------------------------------------------------------------------

    def _post_all(self, *message: Any) -> None:
        data = wire.pack(message)
        for rank in self.ranks:
            self.post(rank, data)

    def post(self, rank: Rank, data: bytes) -> None:
        """Send a packed message to a rank without waiting; `poll` sends what remains."""
        if rank.connected:
            rank.outbox.send(rank.sock, data)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if rank.outbox else 0)
            self._selector.modify(rank.sock, events, rank)

    def poll(self, seconds: float) -> None:
        """Wait up to `seconds` for messages and events, and record them."""
        if any(launch.channel is None for launch in self._launches):
            seconds = min(seconds, _POLL)
        for key, mask in self._selector.select(max(0.0, seconds)):
            if key.data is not None and mask & selectors.EVENT_WRITE:
                self.post(key.data, b"")
            if key.data is not None and mask & selectors.EVENT_READ:  # `None`: a launch channel, read below
                self._read_rank(key.data)
        for launch in self._launches:
            for event in launch.events():
                self._record_event(event)
            channel = launch.channel
            if launch.over and channel is not None and channel in self._selector.get_map():
                self._selector.unregister(channel)

    def _read_rank(self, rank: Rank) -> None:
        if not rank.connected:
            return
        messages, alive = rank.inbox.drain(rank.sock)
        for kind, *fields in messages:
            if kind == "ready":
                if fields[1] == self.group_resets:
                    rank.ready = fields[0]
            elif kind == "failing":
                rank.failing = fields[1] if fields[0] == self.run else None
            elif fields[0] in (0, self.run):  # 0: failure during startup
                rank.answer = (kind, fields[1])
        if not alive:
            rank.connected = False
            self._selector.unregister(rank.sock)

    def _record_event(self, event: starting.Event) -> None:
        if event[0] == "forked":
            for number, pid in event[1]:
                self.ranks[number].pid = pid
        elif event[0] == "exit":
            rank = self.ranks[event[1]]
            self._read_rank(rank)  # read its last messages before recording the exit
            rank.ended = (event[2], event[3])
        else:
            self.error = event[1]
            self.refused = event[0] == "refused"

    # --- Ending ------------------------------------------------------------------------------------------------

    def dump_stacks(self, everyone: bool = False) -> dict[int, str]:
        """Return stack dumps of the unfinished ranks, or with `everyone` of all live ranks."""
        self.poll(0)
        living = [rank for rank in self.ranks if rank.ended is None and rank.pid is not None]
        busy = [rank.number for rank in living if everyone or rank.answer is None]
        if not busy:
            return {}
        files = [self.path(number, "stack") for number in busy]
        seconds = _DUMP_SECONDS if self.one_machine else _REMOTE_DUMP_SECONDS
        ask_for_stacks(files, lambda: self._signal(busy, signal.SIGUSR1), seconds, _QUIET)
        self.poll(0)  # a rank may have finished meanwhile
        return {number: self.read(number, "stack") for number in busy if everyone or self.ranks[number].answer is None}

    def kill(self) -> None:
        """Kill every rank and wait for the exits."""
        self._signal(self._live_ranks(), signal.SIGKILL)
        self._wait_for_exits()

    def _live_ranks(self) -> list[int]:
        return [rank.number for rank in self.ranks if rank.ended is None]

    def _signal(self, ranks: Sequence[int], number: signal.Signals) -> None:
        for launch in self._launches:
            if launch_ranks := [rank for rank in ranks if self.ranks[rank].launch is launch]:
                launch.signal(launch_ranks, number)

    def _wait_for_exits(self) -> bool:
        deadline = time.monotonic() + _EXIT_SECONDS
        while awaited := [rank.launch for rank in self.ranks if rank.ended is None]:
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0 or all(launch is None or launch.over for launch in awaited):
                return False
            self.poll(seconds_left)
        return True

    def request_exit(self, idle: bool) -> None:
        """Ask ranks to exit if ready and `idle` (no active run), else kill them."""
        if self.exit_requested:
            return
        self.exit_requested = True
        self.poll(0)
        if idle and self.ready:
            self._post_all("close")
        else:
            self._signal(self._live_ranks(), signal.SIGKILL)

    def terminate(self, idle: bool) -> None:
        """Call `request_exit`, wait until all ranks have exited, and after a timeout kill them."""
        self.request_exit(idle)
        if not self._wait_for_exits():
            self.kill()

    def release(self, is_owner: bool) -> None:
        """Close all sockets; if `is_owner` (not a forked child), also close the `StartedRanks`."""
        for rank in self.ranks:
            rank.sock.close()
        self._selector.close()
        if is_owner:
            for launch in self._launches:
                launch.close()

    # --- Files -------------------------------------------------------------------------------------------------

    def path(self, rank: int, kind: str) -> Path:
        """Return the path of a rank's file, such as `out` or `stack`."""
        return self._directory / f"rank{rank}.{kind}"

    def read(self, rank: int, kind: str) -> str:
        """Return the text of a rank's file, or `""` if missing."""
        return self.read_bytes(rank, kind).decode("utf-8", "replace")

    def read_bytes(self, rank: int, kind: str) -> bytes:
        """Return the bytes of a rank's file, or `b""` if missing."""
        try:
            return self.path(rank, kind).read_bytes()
        except OSError:
            return b""

    def clear_run_files(self) -> None:
        """Clear the last run's output, stack dumps and attachments, and an unused `FileStore` file."""
        for rank in self.ranks:
            for kind in ("out", "stack"):
                if file_size(path := self.path(rank.number, kind)):
                    os.truncate(path, 0)
            self.path(rank.number, "attachment").unlink(missing_ok=True)
        if self.group_resets > 1:  # the second last group is destroyed on all ranks
            (self._directory / f"store{self.group_resets - 2 or ''}").unlink(missing_ok=True)
