"""pdb on a rank through pytest's terminal: `breakpoint()`, and `--pdb` after a failure.

A rank has no terminal. When its debugger stops, the rank listens on a socket in the world's directory; the parent polls
for sockets while waiting for the ranks (`PdbTerminal.serve_debuggers`) and relays until the rank disconnects. A rank
sends text, or `None` to request a line of input. The timeout is paused meanwhile.
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
from typing import Any, TextIO

import pytest

from ddpcheck.worlds import rank as this_rank

_CONTINUE_SECONDS = 5.0  # seconds for a rank to continue
_NEXT_STOP_SECONDS = 0.3  # seconds to wait for the next stop of a rank that is being stepped


class _Terminal(io.TextIOBase):
    """File object for the parent's terminal; reads single lines, so later input stays unread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def write(self, text: str) -> int:
        self._connection.send(text)
        return len(text)

    def readline(self) -> str:  # type: ignore[override]  # pdb reads whole lines
        self._connection.send(None)
        with contextlib.suppress(EOFError):
            line: str = self._connection.recv()
            return line
        return ""


class _Pdb(pdb.Pdb):
    """pdb that connects to the parent at each stop."""

    def __init__(self, heading: str) -> None:
        self._pending_output = io.StringIO()  # output while not connected
        super().__init__(nosigint=True, readrc=False, stdout=self._pending_output)
        self._pending_output.write(heading)
        self._calls = 0
        self.use_rawinput = False

    def interaction(self, *args: Any, **kwargs: Any) -> Any:
        context = this_rank.current()
        self.prompt = f"(rank {context.rank}) "
        self._calls += 1
        path = context.directory / f"rank{context.rank}.{self._calls}.pdb"
        try:
            with Listener(str(path), "AF_UNIX") as listener, listener.accept() as connection:
                terminal: Any = _Terminal(connection)
                self.stdout = self.stdin = terminal
                terminal.write(self._pending_output.getvalue())
                with contextlib.redirect_stdout(terminal):
                    return super().interaction(*args, **kwargs)
        finally:
            self.stdout = self._pending_output = io.StringIO()


@contextlib.contextmanager
def breakpoints_on_rank(terminal: bool) -> Iterator[None]:
    """Let `breakpoint()` and `pdb.set_trace()` debug this rank, or raise without `terminal`."""
    hooks = sys.breakpointhook, pdb.set_trace
    debugger: list[_Pdb] = []

    def stop(*_: object, **__: object) -> None:
        if not terminal:
            raise RuntimeError(
                "breakpoint() on a rank needs pytest in a terminal; run it without pytest-xdist (-n 0), "
                "and without torchrun or mpirun."
            )
        context = this_rank.current()
        if not debugger:
            debugger.append(_Pdb(f"\n>>> breakpoint() on rank {context.rank} of {context.world_size}\n"))
        debugger[0].set_trace(sys._getframe(1))

    sys.breakpointhook = pdb.set_trace = stop
    try:
        yield
    finally:
        sys.breakpointhook, pdb.set_trace = hooks
        sys.settrace(None) if debugger else None


def post_mortem(error: BaseException, shown: str) -> bool:
    """Debug the frame that raised `error`; return True if the user quit."""
    if isinstance(error, bdb.BdbQuit):
        return True
    context = this_rank.current()
    debugger = _Pdb(f"\n{shown}\n>>> post mortem on rank {context.rank} of {context.world_size}\n")
    debugger.reset()
    debugger.interaction(None, error.__traceback__)
    return bool(debugger.quitting)


class PdbTerminal:
    """Relay between pytest's terminal and debuggers on ranks, in the parent process."""

    def __init__(self, config: pytest.Config) -> None:
        self._capture = config.pluginmanager.getplugin("capturemanager")
        self._rank: str | None = None

    def serve_debuggers(self, directory: Path) -> None:
        """Serve debugger connections of the ranks until none is left."""
        deadline = time.monotonic()
        while True:
            if (path := min(directory.glob("rank*.pdb"), key=_modified_at, default=None)) is not None:
                self._serve_rank(path)
                deadline = time.monotonic() + _NEXT_STOP_SECONDS
            elif time.monotonic() >= deadline:
                return
            else:
                time.sleep(0.01)

    def leave(self) -> None:
        """Forget the debugged rank at the end of a test."""
        self._rank = None

    def _serve_rank(self, path: Path) -> None:
        rank = path.name.partition(".")[0]
        with contextlib.suppress(OSError, EOFError), Client(str(path), "AF_UNIX") as connection:
            if self._rank not in (None, rank):  # failed as well: debug only one rank per test
                connection.send("continue\n")
                while connection.poll(_CONTINUE_SECONDS):
                    connection.recv()
                return
            self._rank = rank
            with self._uncaptured() as terminal:
                while True:
                    if (output := connection.recv()) is not None:
                        terminal.write(output)
                        terminal.flush()
                    else:  # empty at end of input: pdb quits
                        connection.send(_read_line().decode("utf-8", "replace"))

    @contextlib.contextmanager
    def _uncaptured(self) -> Iterator[TextIO]:
        if self._capture is not None:
            self._capture.suspend_global_capture(in_=True)
        try:
            yield sys.stdout
        finally:
            if self._capture is not None:
                self._capture.resume_global_capture()


def _read_line() -> bytes:
    """Read one line of standard input, without reading ahead."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(sys.stdin.fileno(), 1)):
        line += byte
    return line


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
