"""The machine of a process, and how another process of it has ended."""

from __future__ import annotations

import os
import signal
import socket
import time
import uuid
from pathlib import Path

_DEATH = 0.1  # seconds from the end of a process's connections to its own
_POLL = 0.005


def this_machine() -> str:
    """A name that is the same for the processes that can see each other's ids, and for no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode()}"


def how_it_ended(rank: int, pid: int | None) -> str:
    """The end of a rank's process in words, just after that of its connections; `None`: it was on another machine."""
    code = None if pid is None else _exit_code(pid)
    if code is None:
        return f"rank {rank} has ended (its launcher knows how)"
    if code < 0:
        try:
            return f"rank {rank} was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"rank {rank} was killed by signal {-code}"
    return f"rank {rank} ended with exit code {code}, without a Python exception"


def _exit_code(pid: int) -> int | None:
    """The exit code of a process, negative for a signal, as long as its parent has not asked for it."""
    deadline = time.monotonic() + _DEATH
    while time.monotonic() < deadline:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            if fields[0] in "ZX":
                return os.waitstatus_to_exitcode(int(fields[-1]))
        except (OSError, ValueError, IndexError):
            break
        time.sleep(_POLL)
    return None
