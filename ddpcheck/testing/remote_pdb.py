"""pdb on a rank, talked to from the terminal that pytest runs in: `breakpoint()`, and `--pdb` after a failure.

A rank has no terminal. Each time that its debugger wants to talk, it makes two named pipes in the world's directory;
the parent finds them while it waits for the ranks (`PdbTerminal.attend`), and relays until the rank hangs up. No clock
runs meanwhile.
"""

from __future__ import annotations

import bdb
import contextlib
import errno
import io
import os
import pdb
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TextIO

import pytest

from ddpcheck.worlds import rank as this_rank

_ANSWER = 5.0  # for a rank to open its end of a pipe
_NEXT_WORD = 0.3  # in which a rank that is stepped through speaks again


_ASKS = "\0"  # what a rank says when it wants a line


class _Lines:
    """The terminal's lines on a rank, each asked for: what is typed ahead stays for whoever asks next."""

    def __init__(self, say: TextIO, hear: TextIO) -> None:
        self._say = say
        self._hear = hear

    def readline(self) -> str:
        self._say.write(_ASKS)
        self._say.flush()
        return self._hear.readline()


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
        say = here.directory / f"rank{here.rank}.{self._calls}.say"
        hear = say.with_suffix(".hear")
        os.mkfifo(hear)
        os.mkfifo(say)
        try:
            with say.open("w", buffering=1, encoding="utf-8") as out, hear.open(encoding="utf-8") as lines:
                self.stdout, self.stdin = out, _Lines(out, lines)  # type: ignore[assignment]  # pdb only reads lines
                out.write(self._unheard.getvalue())
                with contextlib.redirect_stdout(out):
                    return super().interaction(*args, **kwargs)
        finally:
            self.stdout = self._unheard = io.StringIO()
            say.unlink()
            hear.unlink()


@contextlib.contextmanager
def available(terminal: bool) -> Iterator[None]:
    """On a rank: make `breakpoint()` and `pdb.set_trace()` work while the block runs, or say why they do not."""
    before = sys.breakpointhook, pdb.set_trace
    debugger: list[_Pdb] = []

    def stop(*_: object, **__: object) -> None:
        if not terminal:
            raise RuntimeError(
                "breakpoint() on a rank needs pytest at a terminal of its own; run it without pytest-xdist (-n 0), "
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
            calls = sorted(directory.glob("rank*.say"), key=_age)
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

    def _answer(self, say: Path) -> None:
        rank = say.name.partition(".")[0]
        try:
            heard = os.open(say, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:  # it has gone
            return
        try:
            with contextlib.suppress(OSError), self._open(say.with_suffix(".hear")) as told:
                if self._rank not in (None, rank):  # it failed, too: one conversation a test is enough
                    told.write(b"continue\n")
                    self._relay(heard, told, None)
                    return
                self._rank = rank
                with self._terminal() as terminal:
                    self._relay(heard, told, terminal)
        finally:
            os.close(heard)

    def _open(self, hear: Path) -> IO[bytes]:
        deadline = time.monotonic() + _ANSWER
        while True:
            try:
                return os.fdopen(os.open(hear, os.O_WRONLY | os.O_NONBLOCK), "wb", buffering=0)
            except OSError as error:
                if error.errno != errno.ENXIO or time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    @contextlib.contextmanager
    def _terminal(self) -> Iterator[TextIO]:
        if self._capture is not None:
            self._capture.suspend_global_capture(in_=True)
        try:
            yield sys.stdout
        finally:
            if self._capture is not None:
                self._capture.resume_global_capture()

    def _relay(self, heard: int, told: IO[bytes], terminal: TextIO | None) -> None:
        while select.select([heard], [], [], _ANSWER if terminal is None else None)[0]:
            data = os.read(heard, 1 << 16)
            if not data:
                return
            if terminal is not None:
                terminal.write(data.decode("utf-8", "replace").replace(_ASKS, ""))
                terminal.flush()
                if data.endswith(_ASKS.encode()):
                    if line := _typed():
                        told.write(line)
                    else:  # end of input: the debugger takes that for "quit"
                        told.close()


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
