"""Getting a rank out of where it is stuck, in its own process, so that the process can go on to the next test.

gloo's own `abort()` does not wake waiting threads (measured on torch 2.13: it returns at once, and they go on waiting).
The end of the connections does: a collective that waits on one raises "Connection closed by peer" then, and so
does a rendezvous that waits for a rank which will never come. Python code is interrupted by a signal whose handler
raises.

This module is light: it imports torch only where a group of nccl is aborted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(_HERE)) + os.sep
_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2)  # one that hardly anybody uses
_MAIN_THREAD = threading.main_thread().ident or 0

Sockets = dict[int, int]


class Interrupted(BaseException):
    """Raised into code that did not end by itself; no `Exception`, so that few catch it."""


# --- In Python -----------------------------------------------------------------------------------------------------


class Interruption:
    """Lets another thread raise `Interrupted` in the main thread, while that is inside `allowed`, and so `armed`."""

    def __init__(self) -> None:
        self.armed = False

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Be open to it; to be used in the main thread."""
        signal.signal(_SIGNAL, self._raise)
        try:
            self.armed = True
            yield
        finally:
            self.armed = False
            # Not back to what it was: one that was sent at the last moment would end the process.

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.armed:
            raise Interrupted

    def send(self) -> None:
        """Raise, in the main thread, as soon as it is in Python; nothing happens when it is not open to it."""
        if self.armed:
            signal.pthread_kill(_MAIN_THREAD, _SIGNAL)


def main_stack() -> str:
    """The stack of the main thread in a run, without frames of ddpcheck, as `faulthandler` writes it."""
    frame = sys._current_frames().get(_MAIN_THREAD)
    lines = []
    while frame is not None and not frame.f_code.co_filename.startswith(_HERE):
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join(["Current thread (most recent call first):", *lines]) + "\n"


# --- In a collective -----------------------------------------------------------------------------------------------


def open_sockets() -> Sockets:
    """The sockets of this process, by descriptor, with what tells one from a later one of the same number."""
    found = {}
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError, ValueError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def end_connections(but: Sockets) -> None:
    """End every TCP connection that was not there when `but` was taken: those of a run's process groups."""
    for descriptor, inode in open_sockets().items():
        if but.get(descriptor) == inode:
            continue
        with contextlib.suppress(OSError):
            with socket.socket(fileno=os.dup(descriptor)) as mine:
                if mine.family in (socket.AF_INET, socket.AF_INET6) and mine.type & socket.SOCK_STREAM:
                    mine.getpeername()  # raises where it is only listening
                    mine.shutdown(socket.SHUT_RDWR)


def abort_groups() -> None:
    """Have nccl end what it waits for; for gloo nothing happens."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        with contextlib.suppress(Exception):
            group = dist.group.WORLD
            if group is not None and hasattr(group, "abort") and dist.get_backend(group) != "gloo":
                group.abort()
