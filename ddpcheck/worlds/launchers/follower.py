"""Follower of `leader` on ranks above 0: starts ranks and relays messages.

This module is light: only the started ranks import torch.
"""

from __future__ import annotations

import contextlib
import selectors
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

from ddpcheck.worlds import starting, wire
from ddpcheck.worlds.launchers.detection import LauncherEnv
from ddpcheck.worlds.launchers.rendezvous import PATIENCE, join
from ddpcheck.worlds.launchers.store import LauncherStore
from ddpcheck.worlds.waiting import ask_for_stacks, wait_until

_TICK = 0.1
_POLL = 0.01  # seconds between polls of ranks without a channel
_DEATH = 2.0
_DUMP = 1.5  # seconds for a stack dump; the leader waits slightly longer
_STUCK = 60.0  # seconds without the leader reading from the socket


class Follower:
    """Connection of this process to the leader, with the ranks started for it."""

    def __init__(self, launch: LauncherEnv, *, timeout: float = PATIENCE, store: LauncherStore | None = None) -> None:
        """Connect to the leader; arguments and exceptions as in `join`."""
        self.sock, self.welcome = join(launch, timeout, store)
        self.sock.setblocking(False)
        self._inbox = wire.Inbox()
        self._hosted: dict[int, _Hosted] = {}

    def serve(self) -> bool:
        """Serve requests until the leader is gone; return True after a regular "bye"."""
        try:
            with self.sock:
                while True:
                    self._wait()
                    messages, alive = self._inbox.drain(self.sock)
                    for message in messages:
                        if message[0] == "bye":
                            return True
                        self._do(*message)
                    if not alive:
                        return False
                    for number, hosted in list(self._hosted.items()):
                        if hosted.attend():
                            self._drop(number)
        except ConnectionError:
            return False
        finally:
            for hosted in self._hosted.values():
                with contextlib.suppress(OSError):
                    hosted.end()

    def _wait(self) -> None:
        asking = any(hosted.launch.channel is None for hosted in self._hosted.values())
        with selectors.DefaultSelector() as selector:
            selector.register(self.sock, selectors.EVENT_READ)
            for hosted in self._hosted.values():
                hosted.register(selector)
            selector.select(_POLL if asking else _TICK)

    def _do(self, kind: str, number: int, *rest: Any) -> None:
        if kind == "open":
            self._hosted[number] = _Hosted(self, number, *rest)
        elif (hosted := self._hosted.get(number)) is not None:
            if kind == "bytes":
                hosted.post(rest[0])
            elif kind == "signal":
                hosted.signal(rest[0])
            elif kind == "close":
                self._drop(number)

    def _drop(self, number: int) -> None:
        self._hosted.pop(number).end()
        self.tell("over", number)

    def tell(self, *message: Any) -> None:
        """Send a message to the leader, blocking; raise `OSError` if disconnected."""
        data = memoryview(wire.pack(message))
        with selectors.DefaultSelector() as ready:
            ready.register(self.sock, selectors.EVENT_WRITE)
            while data:
                try:
                    data = data[self.sock.send(data) :]
                except BlockingIOError:
                    if not ready.select(_STUCK):
                        raise ConnectionAbortedError("the leader does not listen") from None


class _Hosted:
    """One rank of one world, started by this process."""

    def __init__(self, follower: Follower, number: int, method: str, rank: int, directory: str, *options: Any) -> None:
        """Start the rank; `options`: hash seed, preload and ahead, as for a `Starter`."""
        self._follower = follower
        self._number = number
        self._rank = rank
        self._directory = Path(directory)
        self._shared = follower.welcome.shared
        self._sent: dict[str, bytes] = {}  # file name -> content already sent to the leader
        self._outbox = wire.Outbox()
        self._inbox = wire.Inbox()
        self._said_all = self._exited = False
        if not self._shared:
            self._directory.mkdir(mode=0o700)
        self._sock, rank_sock = socket.socketpair()
        self._sock.setblocking(False)
        # The fork server removes the directory if this process dies; the leader removes its own.
        scratch = "" if self._shared and method == "fork" else directory
        with rank_sock:
            self.launch = starting.STARTERS[method](scratch, {rank: rank_sock.fileno()}, *options)

    def register(self, selector: selectors.BaseSelector) -> None:
        if not self._said_all:
            writes = selectors.EVENT_WRITE if self._outbox else 0
            selector.register(self._sock, selectors.EVENT_READ | writes)
        if self.launch.channel is not None:
            selector.register(self.launch.channel, selectors.EVENT_READ)

    # --- Requests of the leader ----------------------------------------------------------------------------------

    def post(self, data: bytes) -> None:
        self._outbox.send(self._sock, data)

    def signal(self, number: int) -> None:
        """Signal the rank; send the dump after SIGUSR1 if on another machine."""
        if self._shared or number != signal.SIGUSR1:
            self.launch.signal([self._rank], number)
            return
        stack = self._directory / f"rank{self._rank}.stack"
        ask_for_stacks([stack], lambda: self.launch.signal([self._rank], number), _DUMP, _POLL)
        self._sent.pop(stack.name, None)  # the leader has truncated its copy
        self._show(stack.name)

    # --- Reports to the leader ---------------------------------------------------------------------------------------

    def attend(self) -> bool:
        """Send files, messages and events to the leader; return True at the end."""
        self._outbox.send(self._sock)
        self._show_files()
        self._hand_on()
        for event in self.launch.events():
            if event[0] == "exit":
                self._show_files()
                self._hand_on()  # its last messages before its exit
                self._exited = True
                event = (*event[:3], event[3] + self._follower.welcome.offset)
            elif event[0] == "forked" and not self._shared:
                event = ("forked", [(rank, -pid) for rank, pid in event[1]])  # not a pid of the leader's machine
            self._follower.tell("event", self._number, event)
        return self.launch.over or (self.launch.channel is None and self._exited)

    def _hand_on(self) -> None:
        if self._said_all:
            return
        messages, alive = self._inbox.drain(self._sock)
        if messages:
            self._follower.tell("bytes", self._number, b"".join(wire.pack(self._in_time(item)) for item in messages))
        self._said_all = not alive

    def _in_time(self, message: tuple[Any, ...]) -> tuple[Any, ...]:
        """Convert the times in a message of a rank to the leader's clock."""
        kind, first, second = message
        offset = self._follower.welcome.offset
        if kind == "ready":
            return kind, first + offset, second
        return message if kind == "result" else (kind, first, {**second, "when": second["when"] + offset})

    def _show_files(self) -> None:
        if not self._shared:
            for kind in ("slots", "out", "attachment"):
                self._show(f"rank{self._rank}.{kind}")
            self._show(f"collectives-{self._rank}.log")

    def _show(self, name: str) -> None:
        """Send the changes of a file to the leader."""
        try:
            data = (self._directory / name).read_bytes()
        except OSError:
            return
        before = self._sent.get(name, b"")
        offset = len(before) if data.startswith(before) else 0
        if data != before:
            self._sent[name] = data
            self._follower.tell("file", self._number, name, offset, data[offset:])

    # --- The end -----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Kill the rank if alive, and remove its files."""
        if not self._exited:
            self.launch.signal([self._rank], signal.SIGKILL)
            wait_until(lambda: any(event[0] == "exit" for event in self.launch.events()), _DEATH)
        self._sock.close()
        self.launch.close()
        if not self._shared:
            shutil.rmtree(self._directory, ignore_errors=True)
