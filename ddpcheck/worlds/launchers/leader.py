"""World with one rank per launched process: leader on rank 0, followers on others.

A follower starts a rank, relays messages between the rank and rank 0, and reports its exit. A rank that is killed,
exits or hangs thus affects no launched process, and a `World` is independent of rank locations.

Messages are tuples. To a follower: `("open", world, method, rank, directory, hash seed, preload, ahead)`,
`("bytes", world, data)`, `("signal", world, number)`, `("close", world)` and `("bye",)`. From a follower:
`("bytes", world, data)`, `("file", world, name, offset, data)`, `("event", world, event)` and `("over", world)`.

This module is light: the leader imports torch only if the ranks are on several machines.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import selectors
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpcheck.findings.replace import replace
from ddpcheck.worlds import starting, wire
from ddpcheck.worlds.launchers.detection import LauncherEnv
from ddpcheck.worlds.launchers.rendezvous import PATIENCE, Hello, Joined, gather, join
from ddpcheck.worlds.launchers.store import LauncherStore
from ddpcheck.worlds.starting import ask_for_stacks, wait_until

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_CHUNK = 1 << 18
_CLOSE_SECONDS = 5.0  # seconds for the followers to exit
_TICK = 0.1  # seconds between checks of the ranks' files
_POLL = 0.01  # seconds between polls of ranks without a channel
_EXIT_SECONDS = 2.0  # seconds for a killed rank to exit
_DUMP_SECONDS = 1.5  # seconds for a stack dump; the leader waits slightly longer
_SEND_SECONDS = 60.0  # seconds after which a leader that does not read its socket is given up
_numbers = itertools.count(1)  # of worlds


def local_fields(hellos: Sequence[Hello]) -> list[dict[str, Any]]:
    """Return the `RankConfig` fields local_rank, local_world_size and sharing, for each rank.

    `sharing` is (index, count) among the ranks that see the same GPUs as this rank. Some launchers, such as
    `srun --gpus-per-task=1`, hide GPUs from ranks.
    """
    rows = []
    for hello in hellos:
        peers = [peer for peer in hellos if peer.machine == hello.machine]
        gpu_peers = [peer for peer in peers if _visible_gpus(peer) == _visible_gpus(hello)]
        local, size = hello.launch.local_rank, hello.launch.local_world_size
        local = peers.index(hello) if local is None else local
        sharing = gpu_peers.index(hello), len(gpu_peers)
        rows.append({"local_rank": local, "local_world_size": min(size or len(peers), len(hellos)), "sharing": sharing})
    return rows


def _visible_gpus(hello: Hello) -> list[str | None]:
    environment = hello.context.environment
    return [environment.get(name) for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")]


class Leader:
    """Connections of rank 0 to the other launched processes, which host ranks of worlds."""

    def __init__(
        self,
        launch: LauncherEnv,
        *,
        timeout: float = PATIENCE,
        store: LauncherStore | None = None,
        on_lost: Callable[[int, int | None], object] = lambda rank, pid: None,
    ) -> None:
        """Wait for the followers; arguments and exceptions as in `gather`.

        When a connection closes, a background thread calls `on_lost` with rank and pid (`None` on another machine).
        """
        self.world_size = launch.world_size
        self.launcher = launch.launcher
        leader_hello, joined = gather(launch, timeout, store)
        self._followers = {connection[1].launch.rank: _FollowerLink(connection, on_lost) for connection in joined}
        self.one_machine = all(welcome.shared for _, _, welcome in joined)  # this machine
        self._hellos = [leader_hello, *(hello for _, hello, _ in joined)]
        self._stores: dict[str, TCPStore] = {}  # by the directory of the world
        self._compute_local_fields()

    def _compute_local_fields(self) -> None:
        self._local_fields = local_fields(self._hellos)
        self.sharing = self._local_fields[0]["sharing"][1]  # number of ranks that see the same GPUs as rank 0

    def for_first_ranks(self, contexts: Sequence[wire.ProcessContext]) -> Leader:
        """Return a leader for a smaller world, which has one rank per process context."""
        leader = copy.copy(self)
        leader.world_size = len(contexts)
        leader._hellos = [replace(hello, context=item) for hello, item in zip(self._hellos, contexts, strict=False)]
        leader._compute_local_fields()
        return leader

    def complete_config(self, config: wire.RankConfig) -> wire.RankConfig:
        """Return `config` completed with the rank's store address, process context and local rank."""
        hello = self._hellos[config.rank]
        store = None if self.one_machine else (hello.master or "localhost", self._store_port(config.directory))
        masters = tuple(dict.fromkeys(peer.master for peer in self._hellos))
        config = replace(config, store=store, masters=masters, **self._local_fields[config.rank])
        if config.rank == 0:
            return config
        remote, local = hello.context, config.context
        overrides = {name: local.environment[name] for name in local.explicit}
        return replace(
            config,
            directory=self._followers[config.rank].directory_for(config.directory),
            context=replace(remote, environment={**remote.environment, **overrides}, explicit=local.explicit),
        )

    def _store_port(self, directory: str) -> int:
        if directory not in self._stores:
            from torch._C._distributed_c10d import TCPStore

            for closed in [path for path in self._stores if not os.path.exists(path)]:
                del self._stores[closed]
            self._stores[directory] = TCPStore("localhost", 0, None, True, wait_for_workers=False)
        return self._stores[directory].port

    def starter(self, rank: int, method: str | None) -> starting.Starter:
        """Return the function that starts a rank: locally (rank 0), or by a follower."""
        return partial(RemoteRank, self._followers[rank], method) if rank else starting.STARTERS[method]

    def close(self) -> None:
        """Ask the followers to exit, and wait for the connections to close."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        for follower in self._followers.values():
            follower.send("bye")
        for follower in self._followers.values():
            follower.close(deadline)
        self._stores.clear()


class _FollowerLink:
    def __init__(self, joined: Joined, on_lost: Callable[[int, int | None], object]) -> None:
        self._sock, hello, welcome = joined
        self._on_lost = partial(on_lost, hello.launch.rank, hello.pid if welcome.shared else None)
        self.rank = hello.launch.rank
        self.lost_at: float | None = None  # time of disconnection
        self.worlds: dict[int, RemoteRank] = {}  # by number
        self._folder = None if welcome.shared else hello.temporary
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read_messages, name=f"ddpcheck-rank-{self.rank}", daemon=True)
        self._thread.start()

    def directory_for(self, directory: str) -> str:
        """Return the follower's scratch directory for a world whose directory here is `directory`."""
        if self._folder is None:
            return directory
        return os.path.join(self._folder, f"{os.path.basename(directory)}-{self.rank}")

    def send(self, *message: Any) -> None:
        """Send a message to the follower; ignored if the connection is closed."""
        with self._lock, contextlib.suppress(OSError):
            self._sock.sendall(wire.pack(message))

    def _read_messages(self) -> None:
        try:
            while (message := wire.receive(self._sock)) is not None:
                kind, number, *fields = message
                if (world := self.worlds.get(number)) is not None:
                    world.handle_message(kind, *fields)
                    if kind == "over":
                        del self.worlds[number]
        except OSError:
            pass
        finally:
            self.lost_at = time.monotonic()
            self._on_lost()  # first: callers notified of the exit may ask for the reason
            for world in list(self.worlds.values()):
                world.handle_disconnect(self.lost_at)

    def close(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(1.0)
        self._sock.close()


class RemoteRank:
    """A single rank that a follower starts, with the interface of `StartedRanks`."""

    def __init__(
        self, follower: _FollowerLink, method: str | None, directory: str, fds: Mapping[int, int], *options: Any
    ) -> None:
        ((self._rank, descriptor),) = fds.items()
        self._follower = follower
        self._directory = Path(directory)
        self._rank_end = socket.socket(fileno=os.dup(descriptor))  # stands in for the rank's end of the socket pair
        self._ended = False
        self.over = False
        self._inbox = wire.Inbox()
        self._notify, self._notified = socket.socketpair()
        self._notified.setblocking(False)
        self.channel: socket.socket | None = self._notified
        self._number = next(_numbers)
        follower.worlds[self._number] = self
        self._sender = threading.Thread(target=self._forward, name=f"ddpcheck-to-rank-{self._rank}", daemon=True)
        follower.send("open", self._number, method, self._rank, follower.directory_for(directory), *options)
        self._sender.start()
        if follower.lost_at is not None:
            self.handle_disconnect(follower.lost_at)

    def _forward(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._rank_end.recv(_CHUNK):
                self._follower.send("bytes", self._number, data)
        self._follower.send("close", self._number)

    # --- Listener thread -----------------------------------------------------------------------------------------

    def handle_message(self, kind: str, *rest: Any) -> None:
        with contextlib.suppress(OSError):  # the world is closed
            if kind == "bytes":
                self._rank_end.sendall(rest[0])
            elif kind == "file":
                name, offset, data = rest
                fd = os.open(self._directory / os.path.basename(name), os.O_WRONLY | os.O_CREAT, 0o600)
                with os.fdopen(fd, "wb") as file:
                    file.seek(offset)
                    file.write(data)
                    file.truncate()
            elif kind == "event":
                self._ended |= rest[0][0] == "exit"
                self._notify.sendall(wire.pack(rest[0]))
            else:
                self._notify.close()
                self._rank_end.shutdown(socket.SHUT_WR)

    def handle_disconnect(self, when: float) -> None:
        """Record that the rank has exited, since the connection to its follower is lost."""
        if not self._ended:
            self.handle_message("event", ("exit", self._rank, None, when))
        self.handle_message("over")

    # --- For `RankProcesses` -----------------------------------------------------------------------------------

    def events(self) -> list[starting.Event]:
        events, alive = self._inbox.drain(self._notified)
        self.over = not alive
        return events

    def signal(self, ranks: Sequence[int], number: int) -> None:
        self._follower.send("signal", self._number, int(number))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._rank_end.shutdown(socket.SHUT_RDWR)
        self._sender.join(2.0)
        for sock in (self._rank_end, self._notify, self._notified):
            sock.close()


# --- Follower -----------------------------------------------------------------------------------------------------


class Follower:
    """Connection to the leader, and the ranks that this process starts for it."""

    def __init__(self, launch: LauncherEnv, *, timeout: float = PATIENCE, store: LauncherStore | None = None) -> None:
        """Connect to the leader; arguments and exceptions as in `join`."""
        self.sock, self.welcome = join(launch, timeout, store)
        self.sock.setblocking(False)
        self._inbox = wire.Inbox()
        self._hosted: dict[int, _HostedRank] = {}

    def serve(self) -> bool:
        """Serve requests until the leader is gone; return True after a regular "bye"."""
        try:
            with self.sock:
                while True:
                    self._wait_for_input()
                    messages, alive = self._inbox.drain(self.sock)
                    for message in messages:
                        if message[0] == "bye":
                            return True
                        self._handle(*message)
                    if not alive:
                        return False
                    for number, hosted in list(self._hosted.items()):
                        if hosted.send_reports():
                            self._end_rank(number)
        except ConnectionError:
            return False
        finally:
            for hosted in self._hosted.values():
                with contextlib.suppress(OSError):
                    hosted.end()

    def _wait_for_input(self) -> None:
        is_polling = any(hosted.launch.channel is None for hosted in self._hosted.values())
        with selectors.DefaultSelector() as selector:
            selector.register(self.sock, selectors.EVENT_READ)
            for hosted in self._hosted.values():
                hosted.register(selector)
            selector.select(_POLL if is_polling else _TICK)

    def _handle(self, kind: str, number: int, *rest: Any) -> None:
        if kind == "open":
            self._hosted[number] = _HostedRank(self, number, *rest)
        elif (hosted := self._hosted.get(number)) is not None:
            if kind == "bytes":
                hosted.post(rest[0])
            elif kind == "signal":
                hosted.signal(rest[0])
            elif kind == "close":
                self._end_rank(number)

    def _end_rank(self, number: int) -> None:
        self._hosted.pop(number).end()
        self.send_to_leader("over", number)

    def send_to_leader(self, *message: Any) -> None:
        """Send a message to the leader, blocking; raise `OSError` if disconnected."""
        data = memoryview(wire.pack(message))
        with selectors.DefaultSelector() as ready:
            ready.register(self.sock, selectors.EVENT_WRITE)
            while data:
                try:
                    data = data[self.sock.send(data) :]
                except BlockingIOError:
                    if not ready.select(_SEND_SECONDS):
                        raise ConnectionAbortedError("the leader does not listen") from None


class _HostedRank:
    """One rank of one world, started by this process, a follower."""

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
        self._is_drained = self._exited = False
        if not self._shared:
            self._directory.mkdir(mode=0o700)
        self._sock, rank_sock = socket.socketpair()
        self._sock.setblocking(False)
        # The fork server removes the directory if this process dies; the leader removes its own.
        scratch = "" if self._shared and method == "fork" else directory
        with rank_sock:
            self.launch = starting.STARTERS[method](scratch, {rank: rank_sock.fileno()}, *options)

    def register(self, selector: selectors.BaseSelector) -> None:
        if not self._is_drained:
            writes = selectors.EVENT_WRITE if self._outbox else 0
            selector.register(self._sock, selectors.EVENT_READ | writes)
        if self.launch.channel is not None:
            selector.register(self.launch.channel, selectors.EVENT_READ)

    # --- Requests of the leader ----------------------------------------------------------------------------------

    def post(self, data: bytes) -> None:
        self._outbox.send(self._sock, data)

    def signal(self, number: int) -> None:
        """Send a signal to the rank; for SIGUSR1, send the leader the stack dump."""
        if self._shared or number != signal.SIGUSR1:
            self.launch.signal([self._rank], number)
            return
        stack = self._directory / f"rank{self._rank}.stack"
        ask_for_stacks([stack], lambda: self.launch.signal([self._rank], number), _DUMP_SECONDS, _POLL)
        self._sent.pop(stack.name, None)  # the leader has truncated its copy
        self._send_file(stack.name)

    # --- Reports to the leader ---------------------------------------------------------------------------------------

    def send_reports(self) -> bool:
        """Send files, messages and events to the leader; return True after the last report."""
        self._outbox.send(self._sock)
        self._send_files()
        self._forward_messages()
        for event in self.launch.events():
            if event[0] == "exit":
                self._send_files()
                self._forward_messages()  # its last messages before its exit
                self._exited = True
                event = (*event[:3], event[3] + self._follower.welcome.offset)
            elif event[0] == "forked" and not self._shared:
                event = ("forked", [(rank, -pid) for rank, pid in event[1]])  # not a pid of the leader's machine
            self._follower.send_to_leader("event", self._number, event)
        return self.launch.over or (self.launch.channel is None and self._exited)

    def _forward_messages(self) -> None:
        if self._is_drained:
            return
        messages, alive = self._inbox.drain(self._sock)
        if messages:
            self._follower.send_to_leader(
                "bytes", self._number, b"".join(wire.pack(self._with_leader_times(item)) for item in messages)
            )
        self._is_drained = not alive

    def _with_leader_times(self, message: tuple[Any, ...]) -> tuple[Any, ...]:
        """Convert the times in a message of a rank to the leader's clock."""
        kind, first, second = message
        offset = self._follower.welcome.offset
        if kind == "ready":
            return kind, first + offset, second
        return message if kind == "result" else (kind, first, {**second, "when": second["when"] + offset})

    def _send_files(self) -> None:
        if not self._shared:
            for kind in ("slots", "out", "attachment"):
                self._send_file(f"rank{self._rank}.{kind}")
            self._send_file(f"collectives-{self._rank}.log")

    def _send_file(self, name: str) -> None:
        try:
            data = (self._directory / name).read_bytes()
        except OSError:
            return
        before = self._sent.get(name, b"")
        offset = len(before) if data.startswith(before) else 0
        if data != before:
            self._sent[name] = data
            self._follower.send_to_leader("file", self._number, name, offset, data[offset:])

    # --- The end -----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Kill the rank if alive, and remove its scratch directory unless shared."""
        if not self._exited:
            self.launch.signal([self._rank], signal.SIGKILL)
            wait_until(lambda: any(event[0] == "exit" for event in self.launch.events()), _EXIT_SECONDS)
        self._sock.close()
        self.launch.close()
        if not self._shared:
            shutil.rmtree(self._directory, ignore_errors=True)
