"""Start and signal ranks, by fork (milliseconds), or by exec if fork is unsafe."""

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
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # counting GPUs without NVML forbids a later fork
}
_UNLESS_SET = {"OMP_WAIT_POLICY": "PASSIVE"}  # spinning threads would take cores from other ranks
_TEST_MODULES = (  # preloaded if imported here: saves each rank of a test tens of milliseconds
    "pytest",
    "_pytest.assertion.rewrite",
    "_pytest.assertion.util",
    "_pytest.logging",
    "coverage",
    "ddpcheck.testing.rank_side",
)
_NOT_INHERITED = ("TORCH_DISTRIBUTED_DEBUG",)  # variables not inherited: DETAIL adds collectives

# Under a launcher each rank has its own hash seed, so the order of a set of strings differs between ranks. Two fixed
# seeds keep the verdict deterministic: of all pairs below 400, the pair under which most pairs of common module names
# ("query" and "value", "encoder" and "decoder") swap places.
_HASH_SEEDS = ("230", "391")

_SERVER_CODE = "from ddpcheck.worlds.forkserver import main; main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4])"
_RANK_CODE = "from ddpcheck.worlds.rank import main_spawned; main_spawned(int(sys.argv[1]), int(sys.argv[2]))"

_STOPPED = 3.0  # seconds after which a fork server stopped by a signal is discarded

Event = tuple[Any, ...]
"""`("forked", [(rank, pid), ...])`, `("exit", rank, code, when)`, `("error", text)` or `("refused", text, lasting)`.

The exit code is `None` if the process that started the rank is lost, too.
"""


class StartedRanks(Protocol):
    """Interface to ranks that were started together, with one hash seed."""

    channel: socket.socket | None  # readable if there may be events; if `None`, poll `events`
    over: bool  # True if no more events will follow

    def events(self) -> list[Event]:
        """Return the events since the last call; does not wait."""

    def signal(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal; SIGKILL also goes to child processes of the ranks."""

    def close(self) -> None:
        """Close all descriptors; the ranks must have exited."""


Starter = Callable[[str, Mapping[int, int], str, Sequence[str], bool], StartedRanks]
"""Function that starts ranks: (scratch directory, rank -> its socket's descriptor, hash seed, preload, ahead)."""


def import_path() -> tuple[str, ...]:
    """Return `sys.path` with absolute entries, including the parent directory of ddpcheck."""
    paths = [os.path.abspath(entry) for entry in sys.path]
    home = str(Path(__file__).resolve().parents[2])
    return (*paths, *([] if home in paths else [home]))


def inherited_environment() -> dict[str, str]:
    """Return the environment of this process without variables that ranks must not inherit."""
    return {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}


def process_context(variables: Mapping[str, str] | None = None) -> wire.ProcessContext:
    """Return this process's context for ranks: paths, arguments, and environment updated with `variables`."""
    variables = variables or {}
    return wire.ProcessContext(
        environment={**inherited_environment(), **variables},
        explicit=frozenset(variables),
        cwd=os.getcwd(),
        path=import_path(),
        argv=tuple(sys.argv),
    )


def hash_seeds(world_size: int, *, differ: bool) -> list[str]:
    """Return each rank's `PYTHONHASHSEED`: the user's value, else fixed seeds, alternating if `differ`."""
    hash_seed = os.environ.get("PYTHONHASHSEED", "random")
    if hash_seed not in ("", "random"):
        return [hash_seed] * world_size
    return [_HASH_SEEDS[rank % len(_HASH_SEEDS) if differ else 0] for rank in range(world_size)]


def _popen(
    code: str, fd: int, environment: Mapping[str, str], stdout: Any, stderr: Any, *words: str
) -> subprocess.Popen[bytes]:
    """Start a Python process that runs `code` with arguments `fd`, pid, import path, `words`."""
    if not sys.executable:
        raise UsageError(
            "ddpcheck cannot start ranks: sys.executable is empty; run it from a normal Python interpreter."
        )
    flags = ["-O"] * sys.flags.optimize + ["-B"] * bool(sys.flags.dont_write_bytecode)
    code = f"import sys, json; sys.path[:] = json.loads(sys.argv[3]); {code}"
    return subprocess.Popen(
        [sys.executable, *flags, "-c", code, str(fd), str(os.getpid()), json.dumps(import_path()), *words],
        env=environment,
        pass_fds=(fd,),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,  # Ctrl-C must reach only the parent
    )


def wait_until(holds: Callable[[], object], seconds: float, pause: float = 0.01) -> None:
    """Poll a condition until true, for at most `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(pause)


def ask_for_stacks(files: Sequence[Path], ask: Callable[[], object], seconds: float, quiet: float) -> None:
    """Have ranks dump stacks into `files`: call `ask`, and wait for complete files.

    The files are truncated first, and are complete if none grows for `quiet` seconds. Wait for at most `seconds`.
    """
    for file in files:
        if file_size(file):
            os.truncate(file, 0)
    ask()
    deadline = time.monotonic() + seconds
    before, sizes = [-1], [0]
    while (sizes != before or not all(sizes)) and time.monotonic() < deadline:
        time.sleep(quiet)
        before, sizes = sizes, [file_size(file) for file in files]


def file_size(path: Path) -> int:
    """Return the size of a file in bytes, or 0 if missing."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


# --- By fork -------------------------------------------------------------------------------------------------------


class _ForkServer:
    def __init__(self, hash_seed: str) -> None:
        self.hash_seed = hash_seed
        self.requested_at: float | None = None  # time of the oldest unanswered request
        self._lock = threading.Lock()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # closed with the server
        self._sock, child_sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        modules = json.dumps([name for name in _TEST_MODULES if name in sys.modules])
        environment = {**_UNLESS_SET, **inherited_environment(), **_SINGLE_THREADED, "PYTHONHASHSEED": hash_seed}
        with child_sock:
            self.process = _popen(
                _SERVER_CODE, child_sock.fileno(), environment, subprocess.DEVNULL, self._log, modules
            )

    def __str__(self) -> str:
        return f"the fork server (process {self.process.pid})"

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, request: dict[str, Any], fds: Sequence[int] = (), timeout: float = 60.0) -> None:
        with self._lock:
            self._sock.settimeout(timeout)
            socket.send_fds(self._sock, [pickle.dumps(request)], fds)

    def log(self) -> str:
        """Return the last 20 lines printed by the server."""
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
_world_numbers = itertools.count(1)


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
    """Return the pids of the fork servers of this process."""
    return [server.process.pid for server in _servers.values() if server.alive]


@atexit.register
def shut_down() -> None:
    """Stop the fork servers and all their ranks."""
    with _server_lock:
        servers = list(_servers.values())
        _servers.clear()
    for server in servers:
        server.close()


def _reset_in_child() -> None:
    global _server_lock
    _server_lock = threading.Lock()
    for server in _servers.values():
        server.process.returncode = 0  # the server is a child of our parent process
        server.close()
    _servers.clear()


os.register_at_fork(after_in_child=_reset_in_child)


class ForkedRanks:
    """Ranks of one world, forked from a server that first imports modules `preload`."""

    def __init__(
        self, directory: str, fds: Mapping[int, int], hash_seed: str, preload: Sequence[str], ahead: bool
    ) -> None:
        self.over = False
        self._inbox = wire.Inbox()
        self._awaited: dict[int, int | None] = dict.fromkeys(fds)  # rank -> pid (None until forked); removed on exit
        self._imported_names = ", ".join(preload) or "torch"
        self._running_at = time.monotonic()
        for attempt in (1, 2):
            self._server = _fork_server(hash_seed)
            self._number = next(_world_numbers)
            self._socket, child_sock = socket.socketpair()
            self._socket.setblocking(False)
            try:
                with child_sock:
                    self._open(directory, child_sock.fileno(), list(fds.values()), preload, ahead)
                break
            except OSError as error:  # the server died meanwhile: retry once with a new server
                self._socket.close()
                if attempt == 2:
                    raise DDPCheckError("The fork server does not stay alive.", detail=self._server.log()) from error
                _discard(self._server)
        self.channel: socket.socket | None = self._socket

    def _open(self, directory: str, notify: int, fds: Sequence[int], preload: Sequence[str], ahead: bool) -> None:
        options = {"directory": directory, "ranks": list(self._awaited), "preload": tuple(preload), "ahead": ahead}
        self._server.send({"operation": "open", "world": self._number, **options}, [notify, *fds[: wire.MAX_FDS]])
        for start in range(wire.MAX_FDS, len(fds), wire.MAX_FDS):
            self._server.send({"operation": "more", "world": self._number}, fds[start : start + wire.MAX_FDS])
        self._server.requested_at = self._server.requested_at or time.monotonic()

    @property
    def oldest_fork_request(self) -> tuple[float, str]:
        """Time of the oldest unanswered fork request and why it waits, or (inf, '')."""
        if None not in self._awaited.values() or self._server.requested_at is None:
            return math.inf, ""
        return self._server.requested_at, f", since {self._server} still imports {self._imported_names}"

    def events(self) -> list[Event]:
        if self.over:
            return []
        events, alive = self._inbox.drain(self._socket)
        for kind, data, *rest in events:
            self._server.requested_at = None
            if kind == "forked":
                self._awaited.update(data)
            elif kind == "exit":
                self._awaited.pop(data, None)
            else:
                self._awaited.clear()  # the event has the error message
                if kind == "refused" and rest[0]:
                    _discard(self._server)
        if None not in self._awaited.values() or process_stat(self._server.process.pid)[:1] != ["T"]:
            self._running_at = time.monotonic()
        elif time.monotonic() - self._running_at > _STOPPED:
            self._awaited.clear()
            message = f"{self._server} was stopped by a signal and cannot fork ranks; the next world starts a new one"
            events.append(("error", message))
            _discard(self._server)
        if not alive:
            self.over = True
            if self._awaited:  # the ranks died with the server, their children did not
                for pid in filter(None, self._awaited.values()):
                    kill_group(pid)
                log = self._server.log()
                events.append(("error", "the fork server has died" + (f", saying {log!r}" if log else "")))
        return events

    def signal(self, ranks: Sequence[int], number: int) -> None:
        request = {"operation": "signal", "world": self._number, "ranks": list(ranks), "signal": int(number)}
        with contextlib.suppress(OSError):  # if the server is gone, so are the ranks
            self._server.send(request, timeout=2.0)

    def close(self) -> None:
        self._socket.close()


# --- By exec -------------------------------------------------------------------------------------------------------


class SpawnedRanks:
    """Ranks started by exec; each rank imports `preload` itself."""

    def __init__(
        self, directory: str, fds: Mapping[int, int], hash_seed: str, preload: Sequence[str], ahead: bool
    ) -> None:
        self.channel: socket.socket | None = None
        self.over = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        environment = {**inherited_environment(), "PYTHONHASHSEED": hash_seed}
        for rank, fd in fds.items():
            with open(os.path.join(directory, f"rank{rank}.out"), "ab") as output:
                self._processes[rank] = _popen(_RANK_CODE, fd, environment, output, output)
        self._events: list[Event] = [("forked", [(rank, process.pid) for rank, process in self._processes.items()])]

    def events(self) -> list[Event]:
        events, self._events = self._events, []
        for rank, process in list(self._processes.items()):
            if _has_ended(process):
                kill_group(process.pid)  # children of the rank; the zombie keeps the pid reserved
                events.append(("exit", rank, process.wait(), time.monotonic()))
                del self._processes[rank]
        return events

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
    if hasattr(os, "waitid"):  # not on macOS before Python 3.13
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return process.poll() is not None


def kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


STARTERS: dict[str | None, Starter] = {"fork": ForkedRanks, "spawn": SpawnedRanks}
"""Starter by start method."""
