"""pdb on a rank, talked to from the terminal that pytest runs in: `breakpoint()`, and `--pdb` after a failure.

A rank has no terminal. Each time that its debugger wants to talk, it listens at a socket in the world's directory; the
parent finds that while it waits for the ranks (`PdbTerminal.attend`), and relays until the rank hangs up: texts, or
`None` where a line is asked for. No clock runs meanwhile.
"""

from __future__ import annotations

import bdb
import contextlib
import io
import os
import pdb
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import pytest

from ddpcheck.worlds import rank as this_rank

_ANSWER = 5.0  # for a rank to go on
_NEXT_WORD = 0.3  # in which a rank that is stepped through speaks again


class _Terminal(io.TextIOBase):
    """The terminal, on a rank. Each line is asked for: what is typed ahead stays for whoever asks next."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def write(self, text: str) -> int:
        self._connection.send(text)
        return len(text)

    def readline(self) -> str:  # type: ignore[override]  # pdb asks for whole lines
        self._connection.send(None)
        with contextlib.suppress(EOFError):
            line: str = self._connection.recv()
            return line
        return ""


class _Pdb(pdb.Pdb):
    """pdb that connects to the parent each time that it stops."""

    def __init__(self, heading: str) -> None:
        self._unheard = io.StringIO()  # what it says while nobody listens
        super().__init__(nosigint=True, readrc=False, stdout=self._unheard)
        self._unheard.write(heading)
        self._calls = 0
        self.use_rawinput = False

    def interaction(self, *args: Any, **kwargs: Any) -> Any:
        here = this_rank.current()
        self.prompt = f"(rank {here.rank}) "
        self._calls += 1
        place = here.directory / f"rank{here.rank}.{self._calls}.pdb"
        try:
            with Listener(str(place), "AF_UNIX") as listener, listener.accept() as connection:
                terminal: Any = _Terminal(connection)
                self.stdout = self.stdin = terminal
                terminal.write(self._unheard.getvalue())
                with contextlib.redirect_stdout(terminal):
                    return super().interaction(*args, **kwargs)
        finally:
            self.stdout = self._unheard = io.StringIO()


@contextlib.contextmanager
def available(terminal: bool) -> Iterator[None]:
    """On a rank: make `breakpoint()` and `pdb.set_trace()` work while the block runs, or say why they do not."""
    before = sys.breakpointhook, pdb.set_trace
    debugger: list[_Pdb] = []

    def stop(*_: object, **__: object) -> None:
        if not terminal:
            raise RuntimeError(
                "breakpoint() on a rank needs pytest in a terminal; run it without pytest-xdist (-n 0), "
                "and without torchrun or mpirun."
            )
        here = this_rank.current()
        if not debugger:
            debugger.append(_Pdb(f"\n>>> breakpoint() on rank {here.rank} of {here.world_size}\n"))
        debugger[0].set_trace(sys._getframe(1))

    sys.breakpointhook = pdb.set_trace = stop
    try:
        yield
    finally:
        sys.breakpointhook, pdb.set_trace = before
        sys.settrace(None) if debugger else None


def post_mortem(error: BaseException, shown: str) -> bool:
    """On a rank: open the debugger where `error` was raised; returns whether the whole session is to end."""
    if isinstance(error, bdb.BdbQuit):
        return True
    here = this_rank.current()
    debugger = _Pdb(f"\n{shown}\n>>> post mortem on rank {here.rank} of {here.world_size}\n")
    trace: TracebackType | None = error.__traceback__
    debugger.reset()
    debugger.interaction(None, trace)
    return bool(debugger.quitting)


class PdbTerminal:
    """The parent's end: the terminal."""

    def __init__(self, config: pytest.Config) -> None:
        self._capture = config.pluginmanager.getplugin("capturemanager")
        self._rank: str | None = None

    def attend(self, directory: Path) -> None:
        """Talk with the ranks of a world that want to, until none does."""
        deadline = time.monotonic()
        while True:
            calls = sorted(directory.glob("rank*.pdb"), key=_age)
            if calls:
                self._answer(calls[0])
                deadline = time.monotonic() + _NEXT_WORD
            elif time.monotonic() >= deadline:
                return
            else:
                time.sleep(0.01)

    def leave(self) -> None:
        """The test is over: the next one's ranks are other ranks."""
        self._rank = None

    def _answer(self, place: Path) -> None:
        rank = place.name.partition(".")[0]
        with contextlib.suppress(OSError, EOFError), Client(str(place), "AF_UNIX") as connection:
            if self._rank not in (None, rank):  # it failed, too: one conversation a test is enough
                connection.send("continue\n")
                while connection.poll(_ANSWER):
                    connection.recv()
                return
            self._rank = rank
            with self._terminal() as terminal:
                while True:
                    if (said := connection.recv()) is not None:
                        terminal.write(said)
                        terminal.flush()
                    else:  # nothing at the end of input: the debugger takes that for "quit"
                        connection.send(_typed().decode("utf-8", "replace"))

    @contextlib.contextmanager
    def _terminal(self) -> Iterator[TextIO]:
        if self._capture is not None:
            self._capture.suspend_global_capture(in_=True)
        try:
            yield sys.stdout
        finally:
            if self._capture is not None:
                self._capture.resume_global_capture()


def _typed() -> bytes:
    """The next line of standard input, and no byte of the one after it."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(sys.stdin.fileno(), 1)):
        line += byte
    return line


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
