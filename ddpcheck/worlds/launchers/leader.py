"""Rank 0's side of a world whose ranks live with the processes that a launcher has started: one with each.

Those processes start a rank, hand on what it and rank 0 say to each other, and tell what becomes of it. So a rank that
is killed, exits or hangs takes nobody with it, and a `World` need not know where its ranks are.

What goes over a connection, each a tuple: to the other process `("open", world, directory, rank, hash seed, preload,
ahead, method)`, `("bytes", world, data)`, `("signal", world, number)`, `("close", world)` and `("bye",)`; from there
`("bytes", world, data)`, `("file", world, name, offset, data)`, `("event", world, event)` and `("over", world)`.

This module is light: it imports torch only where the ranks are on several machines.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ddpcheck.worlds import starting, wire
from ddpcheck.worlds.launchers.detection import LauncherEnv
from ddpcheck.worlds.launchers.rendezvous import PATIENCE, Hello, Joined, gather

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_CHUNK = 1 << 18
_FAREWELL = 5.0  # seconds for the other processes to end


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a rank: fields of its `RankConfig`."""

    local_rank: int
    local_world_size: int
    sharing: tuple[int, int]


def places(hellos: Sequence[Hello]) -> list[Place]:
    """The place of each rank, from the first messages of the processes, in order of rank. Pure.

    Launchers that bind a GPU to each process, as `srun --gpus-per-task=1` does, hide the others from it.
    """
    found = []
    for hello in hellos:
        here = [other for other in hellos if other.machine == hello.machine]
        alike = [other.rank for other in here if _visible(other) == _visible(hello)]
        sharing = alike.index(hello.rank), len(alike)
        local = here.index(hello) if hello.local_rank is None else hello.local_rank
        found.append(Place(local, hello.local_world_size or len(here), sharing))
    return found


def _visible(hello: Hello) -> list[str | None]:
    environment = hello.context.environment
    return [environment.get(name) for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")]


class Leader:
    """The processes of a launch, for worlds: pass it as `hosts`. One world at a time; those of one process aside.

    Attributes:
        world_size: How many ranks there are.
        launcher: Who started them.
        one_machine: Whether all are on this machine.
        sharing: How many see the GPUs that this one sees.
    """

    def __init__(self, launch: LauncherEnv, *, timeout: float = PATIENCE) -> None:
        """Wait for the other processes, which follow.

        Raises:
            UsageError: Nothing tells where to meet.
            HangError: Some did not come.
        """
        self.world_size = launch.world_size
        self.launcher = launch.launcher
        self._launch = launch
        mine, joined = gather(launch, timeout)
        self._followers = {each.hello.rank: _Follower(each) for each in joined}
        self.one_machine = all(each.welcome.shared for each in joined)
        self._places = places([mine, *(each.hello for each in joined)])
        self.sharing = self._places[0].sharing[1]
        self._stores: dict[str, tuple[Store, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def settle(self, config: wire.RankConfig) -> wire.RankConfig:
        """The config of a rank with the context of its own process, and the store of all ranks."""
        store = None if self.one_machine else (self._launch.address, self._meeting_port(config.directory))
        config = replace(config, store=store, **asdict(self._places[config.rank]))
        if config.rank == 0:
            return config
        follower, ours = self._followers[config.rank], config.context
        theirs = follower.hello.context
        asked_for = {name: ours.environment[name] for name in ours.explicit}
        return replace(
            config,
            directory=follower.directory_for(config.directory),
            context=replace(theirs, environment={**theirs.environment, **asked_for}, explicit=ours.explicit),
        )

    def _meeting_port(self, directory: str) -> int:
        """The port of the store of the world that has this directory."""
        if directory not in self._stores:
            from torch._C._distributed_c10d import TCPStore

            store = TCPStore("localhost", 0, None, True, wait_for_workers=False)
            self._stores = {directory: (store, store.port)}  # the one of the world before is not needed any more
        return self._stores[directory][1]

    def starter(self, rank: int, own: starting.Starter) -> starting.Starter:
        """The starter of a rank: in this process, or in the process of the launcher that it belongs to."""
        if rank == 0:
            return own
        return partial(RemoteRanks, self._followers[rank], own is starting.ForkedRanks)

    def close(self) -> None:
        """Let the other processes go, and wait until they have."""
        deadline = time.monotonic() + _FAREWELL
        for follower in self._followers.values():
            follower.send(("bye",))
        for follower in self._followers.values():
            follower.close(deadline)
        self._stores.clear()


class _Follower:
    """One of the other processes."""

    def __init__(self, joined: Joined) -> None:
        self.hello = joined.hello
        self.shared = joined.welcome.shared
        self.lost: float | None = None  # when
        self.launches: dict[int, RemoteRanks] = {}
        self._sock = joined.sock
        self._lock = threading.Lock()
        self._numbers = 0
        self._thread = threading.Thread(target=self._listen, name=f"ddpcheck-rank-{self.hello.rank}", daemon=True)
        self._thread.start()

    def directory_for(self, directory: str) -> str:
        """The scratch directory of a world on its machine."""
        if self.shared:
            return directory
        return os.path.join(self.hello.temporary, f"{os.path.basename(directory)}-{self.hello.rank}")

    def add(self, launch: RemoteRanks) -> int:
        """A number for one more world."""
        with self._lock:
            self._numbers += 1
            self.launches[self._numbers] = launch
        return self._numbers

    def send(self, message: tuple[Any, ...]) -> None:
        """Tell it something; nothing happens where it has ended, which is told elsewhere."""
        with self._lock, contextlib.suppress(OSError):
            self._sock.sendall(wire.pack(message))

    def _listen(self) -> None:
        try:
            while (message := wire.receive(self._sock)) is not None:
                kind, number, *rest = message
                if (launch := self.launches.get(number)) is not None:
                    launch.take(kind, *rest)
                    if kind == "over":
                        del self.launches[number]
        except OSError:
            pass
        finally:
            self.lost = time.monotonic()
            for launch in list(self.launches.values()):
                launch.lose(self.lost)

    def close(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(1.0)
        self._sock.close()


class RemoteRanks:
    """One rank of a world, started by another process."""

    def __init__(
        self,
        follower: _Follower,
        forked: bool,
        directory: str,
        fds: Mapping[int, int],
        hash_seed: str,
        preload: Sequence[str] = (),
        ahead: bool = False,
    ) -> None:
        ((self._rank, descriptor),) = fds.items()
        self._follower = follower
        self._directory = Path(directory)
        self._end = socket.socket(fileno=os.dup(descriptor))  # what the rank's would be
        self._news: deque[starting.Event] = deque()
        self._ended = False
        self.over = False
        self._notify, self._notified = socket.socketpair()
        self._notify.setblocking(False)
        self._notified.setblocking(False)
        self.channel: socket.socket | None = self._notified
        self._number = follower.add(self)
        self._sender = threading.Thread(target=self._send, name=f"ddpcheck-to-rank-{self._rank}", daemon=True)
        theirs, method = follower.directory_for(directory), "fork" if forked else "spawn"
        follower.send(("open", self._number, theirs, self._rank, hash_seed, tuple(preload), ahead, method))
        self._sender.start()
        if follower.lost is not None:
            self.lose(follower.lost)

    def _send(self) -> None:
        """Hand on what is said to the rank, until nobody says anything any more."""
        with contextlib.suppress(OSError):
            while data := self._end.recv(_CHUNK):
                self._follower.send(("bytes", self._number, data))
        self._follower.send(("close", self._number))

    # --- In the thread that listens ------------------------------------------------------------------------------

    def take(self, kind: str, *rest: Any) -> None:
        """Something has come from there."""
        if kind == "bytes":
            with contextlib.suppress(OSError):  # the world is closed
                self._end.sendall(rest[0])
        elif kind == "file":
            self._keep(*rest)
        elif kind == "event":
            self._ended |= rest[0][0] == "exit"
            self._tell(rest[0])
        elif kind == "over":
            self._finish()

    def lose(self, when: float) -> None:
        """The process has ended, and so has its rank."""
        if not self.over:
            if not self._ended:
                self._ended = True
                self._tell(("exit", self._rank, None, when))
            self._finish()

    def _finish(self) -> None:
        self.over = True
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def _keep(self, name: str, offset: int, data: bytes) -> None:
        """Keep a part of a file of a rank on another machine where one on this machine would be."""
        with contextlib.suppress(OSError):  # the world is closed
            fd = os.open(self._directory / os.path.basename(name), os.O_WRONLY | os.O_CREAT, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.seek(offset)
                file.write(data)
                file.truncate()

    def _tell(self, event: starting.Event) -> None:
        self._news.append(event)
        with contextlib.suppress(OSError):
            self._notify.send(b"x")

    # --- For `RankProcesses` -----------------------------------------------------------------------------------

    def events(self) -> list[starting.Event]:
        """The events since the last call."""
        with contextlib.suppress(OSError):
            while self._notified.recv(1 << 10):
                pass
        found = []
        while self._news:
            found.append(self._news.popleft())
        return found

    def signal(self, ranks: Sequence[int], number: int) -> None:
        """Have the rank be sent a signal."""
        self._follower.send(("signal", self._number, int(number)))

    def close(self) -> None:
        """Let go."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._sender.join(2.0)
        for end in (self._end, self._notify, self._notified):
            end.close()
