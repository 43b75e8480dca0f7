"""The fork server: a process that has imported torch and forks ranks on request.

No code of the user runs in it but the import of modules that the user has named for it. It is started by exec, stays
single-threaded, runs no operation of torch, and holds no state that a rank could inherit. Requests arrive as one packet
each on a socket from the parent; file descriptors come along with them. Forks and exits are reported on the socket of
the world they belong to. When the parent goes away, by whatever death, every rank goes with it, and so do the scratch
directories.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ddpcheck.worlds import preloading, wire
from ddpcheck.worlds import rank as rank_module
from ddpcheck.worlds.child_processes import children, kill, threads
from ddpcheck.worlds.huge_pages import collapse_memory

_MAX_PACKET = 1 << 16
_TICK = 0.4
_LOOK = 0.02  # seconds between two looks at ranks and parent while something takes its time
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_PRELOAD = ("torch", "torch.distributed", "torch.nn.parallel", "cloudpickle")


_Order = tuple[int, tuple[str, ...], list[int]]
"""Ranks to be forked: the number of their world, what is to be imported before, and a socket for each."""


@dataclass
class _World:
    """One world as the server sees it."""

    notify: socket.socket
    size: int
    pids: dict[int, int] = field(default_factory=dict)  # rank -> pid, while it lives
    forked: int = 0
    backlog: bytearray = field(default_factory=bytearray)

    def tell(self, message: object) -> None:
        """Report to the parent, without ever waiting for it."""
        self.backlog += wire.pack(message)
        self.flush()

    def flush(self) -> None:
        try:
            while self.backlog:
                del self.backlog[: self.notify.send(self.backlog)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:  # the parent has closed its end: nobody wants to know any more
            self.backlog.clear()


class Server:
    """Serves one parent until it is gone.

    An import can take seconds, and meanwhile ranks end, the parent may die, and requests arrive. So during an import
    `_interrupted` has a timer interrupt it, and the handler of SIGALRM runs `_attend`, a pass of the server's loop. It
    runs between any two bytecodes of foreign code, so it must not touch what an import may be changing: it imports
    nothing, forks nothing (a child would go on with half a module), takes no lock of the import system or of logging,
    and writes no standard stream. A fork that is asked for meanwhile is put into `_due`, and the loop opens it later.
    The handler sets the timer again only at its end, so that it never interrupts itself.

    Rejected: a thread that attends, since a process with a second thread cannot be forked safely (the child would
    inherit locks that the thread holds); imports in a forked child, since what they import must be in this process;
    imports in slices, since an import cannot be left in the middle.
    """

    def __init__(self, sock: socket.socket, parent: int) -> None:
        self._sock = sock
        self._parent = parent
        self._pid = os.getpid()
        self._worlds: dict[int, _World] = {}
        self._ranks: dict[int, tuple[int, int]] = {}  # pid -> (world, rank)
        self._broken = ""
        self._unsafe = ""  # why no rank can be forked any more
        self._refusals: dict[str, str] = {}  # by module that was asked for: why it cannot be had, empty where it can
        self._directories: list[str] = []  # of all worlds; the parent removes each, if it lives
        self._opened = False  # whether anybody has asked for a world
        self._complete = False  # whether all is imported that a rank may need
        self._busy = False  # with something that must not be forked in the middle of
        self._due: list[_Order] = []  # to be opened as soon as we are not
        self._waiting: list[_Order] = []  # to be opened when all is imported
        self._libc = ctypes.CDLL(None)

    def preload(self, names: tuple[str, ...]) -> None:
        """Import what every rank needs; a failure is kept for whoever asks for a world."""
        gc.disable()  # a fifth of the time of an import of torch
        try:
            with self._interrupted():
                for name in (*_PRELOAD, *names):
                    importlib.import_module(name)
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            traceback.print_exc()

    def _chores(self) -> Iterator[bool]:
        """Do what can be put off while nobody asks for anything; yields whether worlds that are made ahead still wait.

        The first world of a session does not wait for them. What comes later is forked with less to do: most ranks need
        what is imported here, and large pages make a fork and an exit several times as fast.
        """
        if not self._broken:
            for name in () if os.environ.get(preloading.ONLY_WHAT_IS_ASKED_FOR) else preloading.DDP:
                preloading.import_named(name)  # where it fails, the rank that needs it will say so better
                yield True
            gc.collect()
            gc.freeze()
            yield False
            for _ in collapse_memory(self._libc):
                yield False
        yield False

    def serve(self) -> None:
        """Work until the parent is gone, then end every rank."""
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # so that we can reap what ranks leave behind
        wake_read, wake_write = socket.socketpair()
        self._wake = (wake_read, wake_write)
        for end in self._wake:
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        gc.freeze()
        chores: Iterator[bool] | None = self._chores()
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(self._sock, selectors.EVENT_READ)
            selector.register(wake_read, selectors.EVENT_READ)
            ready: list[Any] = []
            while self._attend(self._sock in ready):
                while self._due:
                    self._open(*self._due.pop(0))
                ready = [key.fileobj for key, _ in selector.select(_TICK if chores is None else 0)]
                if wake_read in ready:
                    _drain(wake_read)
                elif chores is not None and self._opened and not ready:
                    chores = self._do(chores)
        self._end()

    def _attend(self, asked: bool) -> bool:
        """See to the ranks, and to the parent where it has `asked` for something; returns whether to go on."""
        self._reap()
        if os.getppid() != self._parent or (asked and not self._receive()):
            return False
        for number, world in list(self._worlds.items()):
            world.flush()
            self._drop_if_over(number)
        return True

    def _do(self, chores: Iterator[bool]) -> Iterator[bool] | None:
        """Do one part of what was put off; returns the rest."""
        with self._interrupted():
            still = next(chores, None)
        if not still:
            self._complete = True
            self._due += self._waiting
            self._waiting.clear()
        return None if still is None else chores

    @contextlib.contextmanager
    def _interrupted(self) -> Iterator[None]:
        """Attend to ranks and parent during an import, as the class says; forks wait for its end."""

        def look(*_: object) -> None:
            if not self._busy:  # a signal that was on its way at the end
                return
            asked = bool(select.select([self._sock], [], [], 0)[0])
            if not self._attend(asked):
                self._end()
                preloading.clean_up()
                os._exit(0)
            signal.setitimer(signal.ITIMER_REAL, _LOOK)  # only now, or one look would interrupt another

        self._busy = True
        signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, _LOOK)
        try:
            yield
        finally:
            self._busy = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _receive(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, _MAX_PACKET, wire.MAX_FDS + 1)
        except OSError:
            return False
        if not data:
            return False
        request = pickle.loads(data)
        operation = request["operation"]
        if operation == "open":
            self._opened = True
            notify = socket.socket(fileno=fds.pop(0))
            notify.setblocking(False)
            self._worlds[request["world"]] = _World(notify, request["size"])
            self._directories = [*filter(os.path.exists, self._directories), request["directory"]]
        if operation in ("open", "more"):
            order = (request["world"], request["preload"], fds)
            if request["ahead"] and not self._complete:
                self._waiting.append(order)
            elif self._busy:
                self._due.append(order)
            else:
                self._open(*order)
        elif operation == "signal":
            self._signal(request["world"], request["ranks"], request["signal"])
        return True

    def _open(self, number: int, preload: tuple[str, ...], fds: list[int]) -> None:
        if refusal := self._import_named(preload):
            self._refuse(number, refusal, fds)
        else:
            self._fork_all(number, fds)

    def _import_named(self, names: tuple[str, ...]) -> str:
        """Import what the user wants in every rank, once; returns why that cannot be, in a sentence."""
        for name in names:
            if name not in self._refusals:
                with self._interrupted():
                    self._refusals[name] = preloading.import_named(name)
                gc.freeze()
                if (count := threads()) > 1:  # a fork copies one thread, and the locks that the others hold
                    many = "a thread" if count == 2 else f"{count - 1} threads"
                    self._unsafe = (
                        f"preload: importing {name!r} leaves {many} running, and such a process cannot "
                        "be forked; do not preload it"
                    )
            if self._refusals[name]:
                return self._refusals[name]
        return self._unsafe

    def _refuse(self, number: int, sentence: str, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        world = self._worlds.get(number)
        if world is None:
            return
        world.size = 0
        world.tell(("refused", sentence, bool(self._unsafe)))
        self._drop_if_over(number)

    def _fork_all(self, number: int, fds: list[int]) -> None:
        world = self._worlds.get(number)
        if world is None or world.forked == world.size:
            for fd in fds:
                os.close(fd)
            return
        forked = []
        sys.path_importer_cache.clear()  # every rank does, and to free what is shared with us costs it milliseconds
        for index, fd in enumerate(fds):
            rank = world.forked
            try:
                if self._broken:
                    raise ImportError(self._broken)
                pid = os.fork()
            except Exception as error:
                for unused in fds[index:]:
                    os.close(unused)
                world.size = world.forked
                world.tell(("error", f"{type(error).__name__}: {error}"))
                break
            if pid == 0:
                self._become_rank(fd, fds[index + 1 :])
            os.close(fd)
            world.forked += 1
            world.pids[rank] = pid
            self._ranks[pid] = (number, rank)
            forked.append((rank, pid))
        world.tell(("forked", forked))
        self._drop_if_over(number)

    def _become_rank(self, fd: int, others: list[int]) -> NoReturn:
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
            for end in (*self._wake, self._sock, *(world.notify for world in self._worlds.values())):
                end.close()
            for other in (*others, *(fd for _, _, fds in (*self._due, *self._waiting) for fd in fds)):
                os.close(other)
            gc.enable()
            rank_module.main(socket.socket(fileno=fd))
        finally:
            os._exit(70)

    def _signal(self, number: int, ranks: list[int], number_of_signal: int) -> None:
        world = self._worlds.get(number)
        for rank in ranks:
            pid = world.pids.get(rank) if world is not None else None
            if pid is not None:
                kill(pid, number_of_signal)

    def _reap(self) -> None:
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if info is None:
                return
            pid = info.si_pid
            known = self._ranks.pop(pid, None)
            if known is not None:
                kill(pid, signal.SIGKILL)  # its group: loader workers and the like; the zombie keeps the number ours
            _, status = os.waitpid(pid, 0)
            if known is not None:
                number, rank = known
                world = self._worlds[number]
                del world.pids[rank]
                world.tell(("exit", rank, os.waitstatus_to_exitcode(status), time.monotonic()))
                self._drop_if_over(number)

    def _drop_if_over(self, number: int) -> None:
        world = self._worlds[number]
        if not world.pids and world.forked == world.size and not world.backlog:
            world.notify.close()
            del self._worlds[number]

    def _end(self) -> None:
        """The parent is gone or has said goodbye: leave nothing."""
        deadline = time.monotonic() + 2.0
        for pid in list(self._ranks):
            kill(pid, signal.SIGKILL)
        while (left := children()) and time.monotonic() < deadline:
            for pid in left:
                if pid not in self._ranks:
                    kill(pid, signal.SIGKILL)  # what a rank had put into a session of its own
            self._reap()
            time.sleep(0.002)
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)


def _drain(sock: socket.socket) -> None:
    try:
        while sock.recv(4096):
            pass
    except (BlockingIOError, InterruptedError):
        pass


def main(fd: int, parent: int, names: str = "[]") -> None:
    """Run the server on socket `fd` for process `parent`; `names` is a JSON list of more modules to preload."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    server = Server(sock, parent)
    more: list[Any] = json.loads(names)
    server.preload(tuple(str(name) for name in more))
    server.serve()
    sys.stderr.flush()
    os._exit(0)
