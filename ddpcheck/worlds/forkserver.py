"""Fork server: a process with torch imported that forks ranks on request.

Started by exec, the server stays single-threaded, and runs no torch operation and no user code but imports of preloaded
modules. Each request from the parent is one packet on a socket, with file descriptors attached. Forks and exits are
reported on a socket per world. When the parent ends, the server kills all ranks and removes the scratch directories.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import itertools
import json
import os
import pickle
import select
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ddpcheck.worlds import rank as rank_module
from ddpcheck.worlds import rank_setup, wire

_MAX_PACKET = 1 << 16
_TICK = 0.4  # seconds between checks of an idle server for a dead parent
_IMPORT_TICK = 0.02  # seconds between checks of ranks and parent during an import
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MADV_COLLAPSE = 25
_MERGE_BYTES = 16 << 20  # bytes of memory to merge into huge pages per madvise call
_HUGE_PAGE = 2 << 20

_PRELOAD = ("torch", "torch.distributed", "torch.nn.parallel", "cloudpickle")


@dataclass
class _World:
    """Request to fork the ranks of a world once all their sockets have arrived."""

    notify: socket.socket
    awaited: list[int]  # ranks not forked yet
    preload: tuple[str, ...]
    ahead: bool  # the ranks are not needed yet: fork only after all deferred imports
    fds: list[int]  # sockets of the ranks to fork
    outbox: wire.Outbox = field(default_factory=wire.Outbox)

    def send(self, message: object) -> None:
        self.outbox.send(self.notify, wire.pack(message))


class Server:
    """Fork server for one parent process.

    An import can take seconds; meanwhile ranks exit, the parent may die, and requests arrive. During an import
    `_serving_on_timer` sets a timer, whose SIGALRM handler runs `_serve_once`, one pass of the server's loop. The
    handler can run between any two bytecodes of foreign code, so it must not touch state of the import: it does not
    import, does not fork (the child would inherit a half-imported module), takes no import or logging lock, and writes
    to no standard stream. The main loop forks the ranks later. The handler rearms the timer only at its end, so that it
    never interrupts itself.

    Rejected: a second thread, since a multi-threaded process cannot be forked safely (the child would inherit locked
    locks); imports in a forked child, since the modules must be in this process; interruptible imports.
    """

    def __init__(self, sock: socket.socket, parent: int) -> None:
        self._sock = sock
        self._parent = parent
        self._pid = os.getpid()
        self._worlds: dict[int, _World] = {}
        self._ranks: dict[int, tuple[int, int]] = {}  # pid -> (world, rank)
        self._preload_error = ""  # import error of `preload`, or ''
        self._fork_unsafe_reason = ""  # why ranks can no longer be forked, or ''
        self._import_errors: dict[str, str] = {}  # module -> import error, or '' if imported
        self._directories: list[str] = []  # of all worlds; removed by the parent unless it dies
        self._has_all_modules = False  # all modules that a rank may need are imported
        self._importing = False
        self._ahead = False  # a world was created ahead of use at least once
        self._libc = ctypes.CDLL(None)

    def preload(self, names: Sequence[str]) -> None:
        """Import torch, cloudpickle and modules `names`; report errors when ranks are requested."""
        gc.disable()  # collection takes 20% of the time to import torch
        try:
            with self._serving_on_timer():
                for name in (*_PRELOAD, *names):
                    importlib.import_module(name)
        except BaseException as error:
            self._preload_error = f"{type(error).__name__}: {error}"
            traceback.print_exc()

    def _deferred_work(self) -> Iterator[bool]:
        """Import `DDP_MODULES`, collect garbage and merge memory pages, in steps while idle.

        Yields `True` after each step, and `False` if the next step has to wait until all ranks have exited.

        The first world of a session does not wait for this work. Later worlds start faster: most ranks need the modules
        imported here, and huge pages make fork and exit several times faster. But live ranks keep the small pages, so
        merging pages doubles the memory until these ranks exit. If worlds are started ahead of use, some rank is always
        alive, so the work does not wait for exits.
        """
        if not self._preload_error and not os.environ.get(rank_setup.NO_PRELOAD):
            for name in rank_setup.DDP_MODULES:
                rank_setup.import_named(name)  # a failure is reported by the rank that needs the module
                yield True
        gc.collect()
        gc.freeze()
        self._has_all_modules = True
        for _ in itertools.chain([None], _collapse_memory(self._libc)):
            yield True
            while self._ranks and not self._ahead:
                yield False

    def serve(self) -> None:
        """Serve requests until the parent is gone, then kill every rank."""
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # to reap orphaned descendants of ranks
        wake_read, wake_write = socket.socketpair()
        self._wake = (wake_read, wake_write)
        for sock in self._wake:
            sock.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        gc.freeze()
        work = self._deferred_work()
        has_work: bool | None = True  # None once all work is done
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(self._sock, selectors.EVENT_READ)
            selector.register(wake_read, selectors.EVENT_READ)
            ready: list[Any] = []
            while self._serve_once(self._sock in ready):
                while number := next(filter(self._can_fork, self._worlds), None):
                    self._start_world(number)
                ready = [key.fileobj for key, _ in selector.select(0 if has_work else _TICK)]
                if wake_read in ready:
                    with contextlib.suppress(BlockingIOError):
                        while wake_read.recv(4096):
                            pass
                    has_work = has_work is not None  # ranks may have exited
                elif has_work is not None and not ready:
                    with self._serving_on_timer():
                        has_work = next(work, None)
        self._kill_all()

    def _serve_once(self, has_request: bool) -> bool:
        """Reap exited ranks, and receive a request if `has_request`; return False to stop."""
        self._reap()
        if os.getppid() != self._parent or (has_request and not self._receive_request()):
            return False
        for number, world in list(self._worlds.items()):
            world.outbox.send(world.notify)
            self._remove_if_done(number)
        return True

    @contextlib.contextmanager
    def _serving_on_timer(self) -> Iterator[None]:
        """Call `_serve_once` periodically, by a timer signal, while the block imports modules."""

        def on_alarm(*_: object) -> None:
            if not self._importing:  # signal pending at the end of the block
                return
            has_request = bool(select.select([self._sock], [], [], 0)[0])
            if not self._serve_once(has_request):
                self._kill_all()
                rank_setup.clean_up()
                os._exit(0)
            signal.setitimer(signal.ITIMER_REAL, _IMPORT_TICK)  # last, so that the handler never interrupts itself

        self._importing = True
        signal.signal(signal.SIGALRM, on_alarm)
        signal.setitimer(signal.ITIMER_REAL, _IMPORT_TICK)
        try:
            yield
        finally:
            self._importing = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _receive_request(self) -> bool:
        data = b""
        with contextlib.suppress(OSError):
            data, fds, _, _ = socket.recv_fds(self._sock, _MAX_PACKET, wire.MAX_FDS + 1)
        if not data:
            return False
        request = pickle.loads(data)
        if request["operation"] == "signal":
            for pid, (number, rank) in list(self._ranks.items()):
                if number == request["world"] and rank in request["ranks"]:
                    _kill(pid, request["signal"])
            return True
        if request["operation"] == "open":
            notify = socket.socket(fileno=fds.pop(0))
            notify.setblocking(False)
            self._worlds[request["world"]] = _World(notify, request["ranks"], request["preload"], request["ahead"], fds)
            self._directories = [*filter(os.path.exists, self._directories), request["directory"]]
            self._ahead = self._ahead or request["ahead"]
        else:
            self._worlds[request["world"]].fds += fds
        return True

    def _can_fork(self, number: int) -> bool:
        world = self._worlds[number]
        return 0 < len(world.awaited) == len(world.fds) and (self._has_all_modules or not world.ahead)

    def _start_world(self, number: int) -> None:
        world = self._worlds[number]
        if refusal := self._import_named(world.preload):
            world.awaited.clear()
            world.send(("refused", refusal, bool(self._fork_unsafe_reason)))
        else:
            world.send(("forked", self._fork_all(number, world)))
        for fd in world.fds:
            os.close(fd)
        world.fds.clear()
        self._remove_if_done(number)

    def _import_named(self, names: tuple[str, ...]) -> str:
        for name in names:
            if name not in self._import_errors:
                with self._serving_on_timer():
                    self._import_errors[name] = rank_setup.import_named(name)
                gc.freeze()
                count = len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 1
                if count > 1:  # fork copies only one thread, but also locks held by the others
                    threads = "a thread" if count == 2 else f"{count - 1} threads"
                    self._fork_unsafe_reason = (
                        f"preload: importing {name!r} leaves {threads} running, and such a process cannot "
                        "be forked; do not preload it"
                    )
            if self._import_errors[name]:
                return self._import_errors[name]
        return self._fork_unsafe_reason

    def _fork_all(self, number: int, world: _World) -> list[tuple[int, int]]:
        sys.path_importer_cache.clear()  # each rank clears it, and freeing shared pages costs milliseconds
        gc.freeze()  # otherwise garbage collection in a rank would copy every page
        forked = []
        for fd in world.fds:
            try:
                if self._preload_error:
                    raise ImportError(self._preload_error)
                pid = os.fork()
            except Exception as error:
                world.awaited.clear()
                world.send(("error", f"{type(error).__name__}: {error}"))
                break
            if pid == 0:
                self._become_rank(fd)
            self._ranks[pid] = (number, world.awaited.pop(0))
            forked.append((self._ranks[pid][1], pid))
        return forked

    def _become_rank(self, rank_fd: int) -> NoReturn:
        try:
            os.setsid()
            self._libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != self._pid:
                os._exit(1)  # the server died between the fork and the line above
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._selector.close()
            for sock in (*self._wake, self._sock, *(world.notify for world in self._worlds.values())):
                sock.close()
            for fd in itertools.chain.from_iterable(world.fds for world in self._worlds.values()):
                if fd != rank_fd:
                    os.close(fd)
            gc.enable()
            rank_module.main(socket.socket(fileno=rank_fd))
        finally:
            os._exit(70)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # no child is left
            while info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                pid = info.si_pid
                entry = self._ranks.pop(pid, None)
                if entry is not None:
                    _kill(pid, signal.SIGKILL)  # the group, e.g. data loader workers; the zombie keeps the pid reserved
                _, status = os.waitpid(pid, 0)
                if entry is not None:
                    number, rank = entry
                    self._worlds[number].send(("exit", rank, os.waitstatus_to_exitcode(status), time.monotonic()))
                    self._remove_if_done(number)

    def _remove_if_done(self, number: int) -> None:
        world = self._worlds[number]
        has_ranks = any(world_number == number for world_number, _ in self._ranks.values())
        if not has_ranks and not world.awaited and not world.outbox:
            world.notify.close()
            del self._worlds[number]

    def _kill_all(self) -> None:
        deadline = time.monotonic() + 2.0
        for pid in list(self._ranks):
            _kill(pid, signal.SIGKILL)
        while (pids := _children()) and time.monotonic() < deadline:
            for pid in pids:
                if pid not in self._ranks:
                    _kill(pid, signal.SIGKILL)  # descendants in their own session
            self._reap()
            time.sleep(0.002)
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)


def _kill(pid: int, number: int) -> None:
    """Send a signal to an unreaped child; SIGKILL goes to its process group."""
    with contextlib.suppress(OSError):
        is_group = number == signal.SIGKILL and os.getpgid(pid) == pid
        (os.killpg if is_group else os.kill)(pid, number)


def _children() -> list[int]:
    """Return the pids of the children of this process, including adopted orphans."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:  # not supported by this kernel
        return []


def _collapse_memory(libc: ctypes.CDLL) -> Iterator[None]:
    """Merge memory pages into huge pages stepwise, for cheaper forks; needs a recent kernel."""
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for addresses, perms, _, _, _, *name in (line.split(maxsplit=5) for line in lines):
        if perms == "rw-p" and (not name or name[0].startswith(("[heap]", "[anon"))):  # private anonymous memory
            start, end = (int(word, 16) for word in addresses.split("-"))
            start, end = -(-start // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
            for address in range(start, end, _MERGE_BYTES):
                libc.madvise(address, min(_MERGE_BYTES, end - address), _MADV_COLLAPSE)
                yield


def main(fd: int, parent: int, names: str) -> None:
    """Run the server for process `parent`; `names`: JSON list of modules to preload."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    server = Server(sock, parent)
    server.preload(json.loads(names))
    server.serve()
    sys.stderr.flush()
    os._exit(0)
