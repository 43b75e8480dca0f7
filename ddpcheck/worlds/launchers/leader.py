"""Leader on rank 0 of a world with one rank per launched process (follower).

A follower starts a rank, relays messages between the rank and rank 0, and reports its exit. A rank that is killed,
exits or hangs thus affects no launched process, and a `World` is independent of rank locations.

Messages are tuples. To a follower: `("open", world, method, rank, directory, hash seed, preload, ahead)`,
`("bytes", world, data)`, `("signal", world, number)`, `("close", world)` and `("bye",)`. From a follower:
`("bytes", world, data)`, `("file", world, name, offset, data)`, `("event", world, event)` and `("over", world)`.

This module is light: it imports torch only if the ranks are on several machines.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
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
from ddpcheck.worlds.launchers.rendezvous import PATIENCE, Hello, Joined, gather
from ddpcheck.worlds.launchers.store import LauncherStore

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_CHUNK = 1 << 18
_FAREWELL = 5.0  # seconds for the followers to exit
_numbers = itertools.count(1)  # of worlds


def places(hellos: Sequence[Hello]) -> list[dict[str, Any]]:
    """Return the `RankConfig` fields local_rank, local_world_size and sharing of each rank. Pure.

    Launchers that bind a GPU to each process, such as `srun --gpus-per-task=1`, hide the other GPUs.
    """
    rows = []
    for hello in hellos:
        peers = [peer for peer in hellos if peer.machine == hello.machine]
        alike = [peer for peer in peers if _visible(peer) == _visible(hello)]
        local, size = hello.launch.local_rank, hello.launch.local_world_size
        local = peers.index(hello) if local is None else local
        sharing = alike.index(hello), len(alike)
        rows.append({"local_rank": local, "local_world_size": min(size or len(peers), len(hellos)), "sharing": sharing})
    return rows


def _visible(hello: Hello) -> list[str | None]:
    environment = hello.context.environment
    return [environment.get(name) for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")]


class Leader:
    """Launched processes as hosts of worlds; passed as option `hosts`."""

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
        own_hello, joined = gather(launch, timeout, store)
        self._followers = {connection[1].launch.rank: _Follower(connection, on_lost) for connection in joined}
        self.one_machine = all(welcome.shared for _, _, welcome in joined)  # this machine
        self._hellos = [own_hello, *(hello for _, hello, _ in joined)]
        self._stores: dict[str, TCPStore] = {}  # by the directory of the world
        self._place()

    def _place(self) -> None:
        self._places = places(self._hellos)
        self.sharing = self._places[0]["sharing"][1]  # number of ranks that see the same GPUs as rank 0

    def first(self, contexts: Sequence[wire.ProcessContext]) -> Leader:
        """Return a leader for the first `len(contexts)` ranks, with their current contexts."""
        leader = copy.copy(self)
        leader.world_size = len(contexts)
        leader._hellos = [replace(hello, context=item) for hello, item in zip(self._hellos, contexts, strict=False)]
        leader._place()
        return leader

    def settle(self, config: wire.RankConfig) -> wire.RankConfig:
        """Return the config of a rank with its process context and store."""
        hello = self._hellos[config.rank]
        store = None if self.one_machine else (hello.master or "localhost", self._store_port(config.directory))
        masters = tuple(dict.fromkeys(peer.master for peer in self._hellos))
        config = replace(config, store=store, masters=masters, **self._places[config.rank])
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
        """Return the starter of a rank: local for rank 0, else remote."""
        return partial(RemoteRanks, self._followers[rank], method) if rank else starting.STARTERS[method]

    def close(self) -> None:
        """Dismiss the followers and wait for the connections to close."""
        deadline = time.monotonic() + _FAREWELL
        for follower in self._followers.values():
            follower.send("bye")
        for follower in self._followers.values():
            follower.close(deadline)
        self._stores.clear()


class _Follower:
    def __init__(self, joined: Joined, on_lost: Callable[[int, int | None], object]) -> None:
        self._sock, hello, welcome = joined
        self._on_lost = partial(on_lost, hello.launch.rank, hello.pid if welcome.shared else None)
        self.rank = hello.launch.rank
        self.lost: float | None = None  # time of disconnection
        self.worlds: dict[int, RemoteRanks] = {}  # by number
        self._folder = None if welcome.shared else hello.temporary
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name=f"ddpcheck-rank-{self.rank}", daemon=True)
        self._thread.start()

    def directory_for(self, directory: str) -> str:
        """Return the scratch directory of a world on the follower's machine."""
        if self._folder is None:
            return directory
        return os.path.join(self._folder, f"{os.path.basename(directory)}-{self.rank}")

    def send(self, *message: Any) -> None:
        """Send a message to the follower; ignored if the connection is closed."""
        with self._lock, contextlib.suppress(OSError):
            self._sock.sendall(wire.pack(message))

    def _listen(self) -> None:
        try:
            while (message := wire.receive(self._sock)) is not None:
                kind, number, *fields = message
                if (world := self.worlds.get(number)) is not None:
                    world.take(kind, *fields)
                    if kind == "over":
                        del self.worlds[number]
        except OSError:
            pass
        finally:
            self.lost = time.monotonic()
            self._on_lost()  # first: callers notified of the exit may ask for the reason
            for world in list(self.worlds.values()):
                world.lose(self.lost)

    def close(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(1.0)
        self._sock.close()


class RemoteRanks:
    """One rank of a world, started by a follower."""

    def __init__(
        self, follower: _Follower, method: str | None, directory: str, fds: Mapping[int, int], *options: Any
    ) -> None:
        ((self._rank, descriptor),) = fds.items()
        self._follower = follower
        self._directory = Path(directory)
        self._end = socket.socket(fileno=os.dup(descriptor))  # stands in for the rank's end of the socket pair
        self._ended = False
        self.over = False
        self._inbox = wire.Inbox()
        self._notify, self._notified = socket.socketpair()
        self._notified.setblocking(False)
        self.channel: socket.socket | None = self._notified
        self._number = next(_numbers)
        follower.worlds[self._number] = self
        self._sender = threading.Thread(target=self._send, name=f"ddpcheck-to-rank-{self._rank}", daemon=True)
        follower.send("open", self._number, method, self._rank, follower.directory_for(directory), *options)
        self._sender.start()
        if follower.lost is not None:
            self.lose(follower.lost)

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._end.recv(_CHUNK):
                self._follower.send("bytes", self._number, data)
        self._follower.send("close", self._number)

    # --- Listener thread -----------------------------------------------------------------------------------------

    def take(self, kind: str, *rest: Any) -> None:
        with contextlib.suppress(OSError):  # the world is closed
            if kind == "bytes":
                self._end.sendall(rest[0])
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
                self._end.shutdown(socket.SHUT_WR)

    def lose(self, when: float) -> None:
        """Report the exit of the rank when its follower is lost."""
        if not self._ended:
            self.take("event", ("exit", self._rank, None, when))
        self.take("over")

    # --- For `RankProcesses` -----------------------------------------------------------------------------------

    def events(self) -> list[starting.Event]:
        events, alive = self._inbox.drain(self._notified)
        self.over = not alive
        return events

    def signal(self, ranks: Sequence[int], number: int) -> None:
        self._follower.send("signal", self._number, int(number))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._sender.join(2.0)
        for sock in (self._end, self._notify, self._notified):
            sock.close()
