"""Starting ranks, in the parent: through the fork server, or by exec where a fork is unsafe.

Each way of starting, `launchers` too, gives a `StartedRanks`: events to read, ranks to signal. The way makes no
difference to anything else, except that a fork costs milliseconds and an exec costs an import of torch.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from ddpcheck.findings.errors import DDPCheckError, UsageError
from ddpcheck.findings.files import process_stat
from ddpcheck.worlds import wire

_SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # the other way of counting GPUs forbids a fork afterwards
}
_UNLESS_SET = {"OMP_WAIT_POLICY": "PASSIVE"}  # threads that spin while they wait take the cores from other ranks
_IN_TESTS = (  # what ranks of a test import, where this process has imported it: tens of milliseconds in each of them
    "pytest",
    "_pytest.assertion.rewrite",
    "_pytest.assertion.util",
    "_pytest.logging",
    "coverage",
    "ddpcheck.testing.rank_side",
)
_FORGOTTEN = ("TORCH_DISTRIBUTED_DEBUG",)  # DETAIL adds collectives of its own to every one of the user's

# Under a launcher every rank has a hash seed of its own, so that an order taken from a set of strings differs from rank
# to rank. Two fixed seeds, since a verdict must not change from run to run: of all pairs below 400 the one under which
# most pairs of names that are common in models ("query" and "value", "encoder" and "decoder") change places.
_HASH_SEEDS = ("230", "391")

_SERVER_CODE = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[3]); "
    "from ddpcheck.worlds.forkserver import main; main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4])"
)
_RANK_CODE = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[3]); "
    "from ddpcheck.worlds.rank import main_spawned; main_spawned(int(sys.argv[1]), int(sys.argv[2]))"
)

_STOPPED = 3.0  # seconds in which a fork server that a signal has stopped may be continued

Event = tuple[Any, ...]
"""`("forked", [(rank, pid), ...])`, `("exit", rank, code, when)`, `("error", text)` or `("refused", text, lasting)`.

The code of an exit is `None` where the process that had started the rank was lost with it.
"""


class StartedRanks(Protocol):
    """Ranks that have been started with one hash seed."""

    channel: socket.socket | None
    """Readable when there may be events; `None` when one has to ask from time to time."""

    over: bool
    """Whether there will be no more events."""

    def events(self) -> list[Event]:
        """The events since the last call; does not wait."""

    def signal(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal; SIGKILL reaches the processes that a rank has started, too."""

    def close(self) -> None:
        """Let go of descriptors; the ranks must be dead."""


Starter = Callable[[str, Mapping[int, int], str, Sequence[str], bool], StartedRanks]
"""Starts ranks: each finds its files in the directory, and its end of a socket pair at its descriptor of the mapping.

The others are the hash seed, the modules to be imported before, and whether the ranks are made ahead of their use.
"""


def import_path() -> tuple[str, ...]:
    """Our `sys.path` in a form that means the same in another directory, with ddpcheck itself on it."""
    paths = [os.path.abspath(entry) for entry in sys.path]
    home = str(Path(__file__).resolve().parents[2])
    return (*paths, *([] if home in paths else [home]))


def inherited_environment() -> dict[str, str]:
    """Our environment as the ranks get it."""
    return {key: value for key, value in os.environ.items() if key not in _FORGOTTEN}


def process_context(asked_for: Mapping[str, str] | None = None) -> wire.ProcessContext:
    """The state of this process as ranks take it over, with the variables that were `asked_for` on top of ours."""
    asked_for = asked_for or {}
    return wire.ProcessContext(
        environment={**inherited_environment(), **asked_for},
        explicit=frozenset(asked_for),
        cwd=os.getcwd(),
        path=import_path(),
        argv=tuple(sys.argv),
    )


def hash_seeds(world_size: int, *, own: bool) -> list[str]:
    """The `PYTHONHASHSEED` of each rank: one for all, or one for even and one for odd ranks; the user's own wins."""
    given = os.environ.get("PYTHONHASHSEED", "random")
    if given not in ("", "random"):
        return [given] * world_size
    return [_HASH_SEEDS[rank % len(_HASH_SEEDS) if own else 0] for rank in range(world_size)]


def interpreter() -> list[str]:
    """The command that starts Python as this process was started."""
    if not sys.executable:
        raise UsageError(
            "ddpcheck cannot start ranks: sys.executable is empty; run it from a normal Python interpreter."
        )
    flags = ["-O"] * sys.flags.optimize + ["-B"] * bool(sys.flags.dont_write_bytecode)
    return [sys.executable, *flags]


# --- By fork -------------------------------------------------------------------------------------------------------


class _ForkServer:
    """The parent's handle on a fork server."""

    def __init__(self, hash_seed: str) -> None:
        self.hash_seed = hash_seed
        self.asked_at: float | None = None  # since when it owes an answer to a world
        self._lock = threading.Lock()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # lives as long as the server
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path, more = json.dumps(import_path()), json.dumps([name for name in _IN_TESTS if name in sys.modules])
        with theirs:
            self.process = subprocess.Popen(
                [*interpreter(), "-c", _SERVER_CODE, str(theirs.fileno()), str(os.getpid()), path, more],
                env={**_UNLESS_SET, **inherited_environment(), **_SINGLE_THREADED, "PYTHONHASHSEED": hash_seed},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C is for the parent alone
            )

    def __str__(self) -> str:
        return f"the fork server (process {self.process.pid})"

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, request: dict[str, Any], fds: Sequence[int] = (), timeout: float = 60.0) -> None:
        """Send a request; an `OSError` says that the server is gone."""
        with self._lock:
            self._sock.settimeout(timeout)
            socket.send_fds(self._sock, [pickle.dumps(request)], fds)

    def log(self) -> str:
        """The last lines that the server has printed."""
        try:
            data = os.pread(self._log.fileno(), 1 << 20, 0)
        except (OSError, ValueError):
            return ""
        return "\n".join(data.decode("utf-8", "replace").splitlines()[-20:])

    def close(self) -> None:
        self._sock.close()
        self._log.close()
        try:
            self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_servers: dict[str, _ForkServer] = {}  # by hash seed
_server_lock = threading.Lock()
_numbers = itertools.count(1)


def _fork_server(hash_seed: str) -> _ForkServer:
    with _server_lock:
        server = _servers.get(hash_seed)
        if server is None or not server.alive:
            if server is not None:
                server.close()
            server = _servers[hash_seed] = _ForkServer(hash_seed)
        return server


def _discard(server: _ForkServer) -> None:
    with _server_lock:
        if _servers.get(server.hash_seed) is server:
            del _servers[server.hash_seed]
            server.close()


def server_pids() -> list[int]:
    """The process ids of this process's fork servers."""
    return [server.process.pid for server in _servers.values() if server.alive]


def shut_down() -> None:
    """End the fork servers, and with them every rank that they have forked; the next world starts others."""
    with _server_lock:
        servers = list(_servers.values())
        _servers.clear()
    for server in servers:
        server.close()


def _after_fork() -> None:
    global _server_lock
    _server_lock = threading.Lock()
    for server in _servers.values():
        server.process.returncode = 0  # it is the other process's child
        server.close()
    _servers.clear()


atexit.register(shut_down)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class ForkedRanks:
    """Ranks forked by the fork server of a hash seed, one for each descriptor; `preload` is imported there before.

    `ahead` says that nobody is waiting for them, so that the server may first do what it has put off.
    """

    def __init__(
        self, directory: str, fds: Mapping[int, int], hash_seed: str, preload: Sequence[str], ahead: bool
    ) -> None:
        self.over = False
        self._inbox = wire.Inbox()
        self._awaited: dict[int, int | None] = dict.fromkeys(fds)  # those that have not ended, with their process ids
        self._imports = ", ".join(preload) or "torch"
        self._ran_at = time.monotonic()
        for attempt in (1, 2):
            self._server = _fork_server(hash_seed)
            self._number = next(_numbers)
            self._socket, theirs = socket.socketpair()
            self._socket.setblocking(False)
            try:
                with theirs:
                    self._open(directory, theirs.fileno(), list(fds.values()), preload, ahead)
                break
            except OSError as error:  # it has died since we last looked: once more, with another
                self._socket.close()
                if attempt == 2:
                    raise DDPCheckError("The fork server does not stay alive.", detail=self._server.log()) from error
                _discard(self._server)
        self.channel: socket.socket | None = self._socket

    def _open(self, directory: str, notify: int, fds: Sequence[int], preload: Sequence[str], ahead: bool) -> None:
        more = {"operation": "more", "world": self._number, "preload": tuple(preload), "ahead": ahead}
        request = {**more, "operation": "open", "directory": directory, "ranks": list(self._awaited)}
        self._server.send(request, [notify, *fds[: wire.MAX_FDS]])
        for first in range(wire.MAX_FDS, len(fds), wire.MAX_FDS):
            self._server.send(more, fds[first : first + wire.MAX_FDS])
        self._server.asked_at = self._server.asked_at or time.monotonic()

    @property
    def server_owes(self) -> tuple[float, str]:
        """Since when the fork server has not answered, and that in words; infinite where it has forked the ranks."""
        if None not in self._awaited.values() or self._server.asked_at is None:
            return math.inf, ""
        return self._server.asked_at, f", since {self._server} still imports {self._imports}"

    def events(self) -> list[Event]:
        if self.over:
            return []
        events, alive = self._inbox.drain(self._socket)
        for kind, what, *rest in events:
            self._server.asked_at = None
            if kind == "forked":
                self._awaited.update(what)
            elif kind == "exit":
                self._awaited.pop(what, None)
            else:
                self._awaited.clear()  # it says itself what is wrong
                if kind == "refused" and rest[0]:
                    _discard(self._server)
        if None not in self._awaited.values() or process_stat(self._server.process.pid)[:1] != ["T"]:
            self._ran_at = time.monotonic()
        elif time.monotonic() - self._ran_at > _STOPPED:
            self._awaited.clear()
            said = f"{self._server} was stopped by a signal and cannot fork ranks; the next world starts a new one"
            events.append(("error", said))
            _discard(self._server)
        if not alive:
            self.over = True
            if self._awaited:  # the ranks have died with it, but not what they had started
                for pid in filter(None, self._awaited.values()):
                    kill_group(pid)
                log = self._server.log()
                events.append(("error", "the fork server has died" + (f", saying {log!r}" if log else "")))
        return events

    def signal(self, ranks: Sequence[int], number: int) -> None:
        request = {"operation": "signal", "world": self._number, "ranks": list(ranks), "signal": int(number)}
        with contextlib.suppress(OSError):  # no server, no rank: they die with it
            self._server.send(request, timeout=2.0)

    def close(self) -> None:
        self._socket.close()


# --- By exec -------------------------------------------------------------------------------------------------------


class SpawnedRanks:
    """Ranks started by exec with a hash seed, each a child of ours; each imports what is to be preloaded by itself."""

    def __init__(
        self, directory: str, fds: Mapping[int, int], hash_seed: str, preload: Sequence[str], ahead: bool
    ) -> None:
        self.channel: socket.socket | None = None
        self.over = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        path = json.dumps(import_path())
        for rank, fd in fds.items():
            with open(os.path.join(directory, f"rank{rank}.out"), "ab") as output:
                self._processes[rank] = subprocess.Popen(
                    [*interpreter(), "-c", _RANK_CODE, str(fd), str(os.getpid()), path],
                    env={**inherited_environment(), "PYTHONHASHSEED": hash_seed},
                    pass_fds=(fd,),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        self._news: list[Event] = [("forked", [(rank, process.pid) for rank, process in self._processes.items()])]

    def events(self) -> list[Event]:
        news, self._news = self._news, []
        for rank, process in list(self._processes.items()):
            if _has_ended(process):
                kill_group(process.pid)  # what the rank has started; the zombie keeps the number ours
                news.append(("exit", rank, process.wait(), time.monotonic()))
                del self._processes[rank]
        return news

    def signal(self, ranks: Sequence[int], number: int) -> None:
        for rank in ranks:
            if (process := self._processes.get(rank)) is not None:
                if number == signal.SIGKILL:
                    kill_group(process.pid)
                process.send_signal(number)

    def close(self) -> None:
        for process in self._processes.values():
            kill_group(process.pid)
            process.kill()
            process.wait()
        self._processes.clear()


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    if hasattr(os, "waitid"):
        try:
            return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            pass
    return process.poll() is not None


def kill_group(pid: int) -> None:
    """Kill a process and all that it has started."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
