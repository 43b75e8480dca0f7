"""Starting ranks: through the fork server, or each by exec. The parent's side; light, never imports torch.

Both ways give the same thing, a `Launch`: events to read, ranks to signal. Which way is taken makes no
difference to anything else, except that a fork costs milliseconds and an exec costs an import of torch.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from ddpcheck.errors import DdpcheckError, UsageError
from ddpcheck.worlds import wire
from ddpcheck.worlds.wire import MAX_FDS

_SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # the other way of counting GPUs forbids a fork afterwards
}
_UNLESS_SET = {
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait take the cores from the other ranks
}
_FORGOTTEN = ("TORCH_DISTRIBUTED_DEBUG",)  # DETAIL adds collectives of its own to every one of the user's

_SERVER_CODE = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[3]); "
    "from ddpcheck.worlds.forkserver import main; main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4])"
)
_RANK_CODE = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[3]); "
    "from ddpcheck.rank import main_spawned; main_spawned(int(sys.argv[1]), int(sys.argv[2]))"
)

Event = tuple[Any, ...]
"""`("forked", [(rank, pid), ...])`, `("exit", rank, code, when)`, `("error", text)` or `("refused", text, lasting)`."""


class Launch(Protocol):
    """Ranks that have been started."""

    channel: socket.socket | None
    """Readable when there may be events; `None` when one has to ask from time to time."""

    def events(self) -> list[Event]:
        """What has happened since the last call; does not wait."""

    def signal(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal; SIGKILL reaches the processes that a rank has started, too."""

    def close(self) -> None:
        """Let go of descriptors; the ranks must be dead."""


def import_path() -> tuple[str, ...]:
    """Our `sys.path` in a form that means the same in another directory, with ddpcheck itself on it."""
    paths = [os.path.abspath(entry) for entry in sys.path]
    home = str(Path(__file__).resolve().parents[2])
    return (*paths, *([] if home in paths else [home]))


def inherited_environment() -> dict[str, str]:
    """Our environment as the ranks get it."""
    return {key: value for key, value in os.environ.items() if key not in _FORGOTTEN}


def _interpreter() -> list[str]:
    if not sys.executable:
        raise UsageError(
            "ddpcheck cannot start ranks: sys.executable is empty; run it from a normal Python interpreter."
        )
    flags = ["-O"] * sys.flags.optimize + ["-B"] * bool(sys.flags.dont_write_bytecode)
    return [sys.executable, *flags]


# --- By fork -------------------------------------------------------------------------------------------------------


class _ForkServer:
    """The parent's handle on its fork server."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # lives as long as the server
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock = ours
        more = ["pytest", "_pytest.assertion.rewrite"] if "pytest" in sys.modules else []
        with theirs:
            self._process = subprocess.Popen(
                [
                    *_interpreter(),
                    "-c",
                    _SERVER_CODE,
                    str(theirs.fileno()),
                    str(self.pid),
                    json.dumps(import_path()),
                    json.dumps(more),
                ],
                env={**_UNLESS_SET, **inherited_environment(), **_SINGLE_THREADED},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C is for the parent alone
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def process_id(self) -> int:
        return self._process.pid

    def send(self, request: dict[str, Any], fds: Sequence[int] = (), timeout: float = 60.0) -> None:
        """Send a request.

        Raises:
            OSError: When the server is gone.
        """
        with self._lock:
            self._sock.settimeout(timeout)
            socket.send_fds(self._sock, [pickle.dumps(request)], fds)

    def log(self) -> str:
        """What the server had to say, the last lines of it."""
        try:
            data = os.pread(self._log.fileno(), 1 << 20, 0)
        except (OSError, ValueError):
            return ""
        return "\n".join(data.decode("utf-8", "replace").splitlines()[-20:])

    def close(self) -> None:
        self._sock.close()
        self._log.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """After a fork of the parent: this is the other process's server."""
        self._sock.close()
        self._log.close()
        self._process.returncode = 0  # not our child


_server: _ForkServer | None = None
_server_lock = threading.Lock()
_numbers = itertools.count(1)


def _fork_server() -> _ForkServer:
    global _server
    with _server_lock:
        if _server is not None and not _server.alive:
            _server.close()
            _server = None
        if _server is None:
            _server = _ForkServer()
        return _server


def _discard(server: _ForkServer) -> None:
    global _server
    with _server_lock:
        if _server is server:
            _server = None
            server.close()


def server_pid() -> int | None:
    """The process id of this process's fork server, `None` when there is none."""
    return _server.process_id if _server is not None and _server.alive else None


def shut_down() -> None:
    """End the fork server, and with it every rank that it has forked; the next world starts another."""
    global _server
    with _server_lock:
        server, _server = _server, None
    if server is not None and server.pid == os.getpid():
        server.close()


def _after_fork() -> None:
    global _server, _server_lock
    _server_lock = threading.Lock()
    server, _server = _server, None
    if server is not None:
        server.forget()


atexit.register(shut_down)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class ForkLaunch:
    """Ranks forked by the fork server, one for each descriptor; `preload` names modules for it to import before."""

    def __init__(self, directory: str, fds: Sequence[int], preload: Sequence[str] = ()) -> None:
        self._inbox = wire.Inbox()
        self._over = False
        self._awaited = len(fds)
        self._pids: dict[int, int] = {}  # of the ranks that live
        for attempt in (1, 2):
            self._server = _fork_server()
            self._number = next(_numbers)
            self._socket, theirs = socket.socketpair()
            self._socket.setblocking(False)
            try:
                with theirs:
                    self._open(directory, theirs.fileno(), fds, preload)
                break
            except OSError as error:  # it has died since we last looked: once more, with another
                self._socket.close()
                if attempt == 2:
                    raise DdpcheckError("The fork server does not stay alive.", detail=self._server.log()) from error
                _discard(self._server)
        self.channel: socket.socket | None = self._socket

    def _open(self, directory: str, notify: int, fds: Sequence[int], preload: Sequence[str]) -> None:
        request = {"operation": "open", "world": self._number, "directory": directory, "size": len(fds)}
        request["preload"] = tuple(preload)
        self._server.send(request, [notify, *fds[:MAX_FDS]])
        for first in range(MAX_FDS, len(fds), MAX_FDS):
            self._server.send({"operation": "more", "world": self._number}, fds[first : first + MAX_FDS])

    def events(self) -> list[Event]:
        if self._over:
            return []
        events, alive = self._inbox.drain(self._socket)
        for event in events:
            if event[0] == "forked":
                self._pids.update(event[1])
            elif event[0] == "exit":
                self._pids.pop(event[1], None)
                self._awaited -= 1
            else:
                self._awaited = 0  # it says itself what is wrong
                if event[0] == "refused" and event[2]:
                    _discard(self._server)
        if not alive:
            self._over = True
            if self._awaited:  # the ranks have died with it, but not what they had started
                for pid in self._pids.values():
                    _kill_group(pid)
                log = self._server.log()
                events.append(("error", "the fork server has died" + (f", saying {log!r}" if log else "")))
        return events

    @property
    def over(self) -> bool:
        return self._over

    def signal(self, ranks: Sequence[int], number: int) -> None:
        try:
            self._server.send(
                {"operation": "signal", "world": self._number, "ranks": list(ranks), "signal": int(number)}, timeout=2.0
            )
        except OSError:
            pass  # no server, no rank: they die with it

    def close(self) -> None:
        self._socket.close()


# --- By exec -------------------------------------------------------------------------------------------------------


class SpawnLaunch:
    """Ranks started by exec, each a child of ours; each imports what is to be preloaded for itself."""

    def __init__(self, directory: str, fds: Sequence[int], preload: Sequence[str] = ()) -> None:
        self.channel: socket.socket | None = None
        self.over = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._news: list[Event] = []
        path = json.dumps(import_path())
        for rank, fd in enumerate(fds):
            with open(os.path.join(directory, f"rank{rank}.out"), "ab") as output:
                self._processes[rank] = subprocess.Popen(
                    [*_interpreter(), "-c", _RANK_CODE, str(fd), str(os.getpid()), path],
                    env=inherited_environment(),
                    pass_fds=(fd,),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        self._news.append(("forked", [(rank, process.pid) for rank, process in self._processes.items()]))

    def events(self) -> list[Event]:
        news, self._news = self._news, []
        for rank, process in list(self._processes.items()):
            if not _has_ended(process):
                continue
            _kill_group(process.pid)  # what the rank has started; the zombie keeps the number ours
            code = process.wait()
            del self._processes[rank]
            news.append(("exit", rank, code, time.monotonic()))
        return news

    def signal(self, ranks: Sequence[int], number: int) -> None:
        for rank in ranks:
            process = self._processes.get(rank)
            if process is None:
                continue
            if number == signal.SIGKILL:
                _kill_group(process.pid)
            process.send_signal(number)

    def close(self) -> None:
        for process in self._processes.values():
            _kill_group(process.pid)
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


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass
