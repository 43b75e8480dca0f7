"""The children and threads of the fork server. Light: never imports torch."""

from __future__ import annotations

import os
import signal


def kill(pid: int, number: int) -> None:
    """Signal a child that has not been reaped; SIGKILL goes to its whole group."""
    if number == signal.SIGKILL:
        try:
            if os.getpgid(pid) == pid:
                os.killpg(pid, number)
                return
        except OSError:
            pass
    try:
        os.kill(pid, number)
    except OSError:
        pass


def children() -> list[int]:
    """The children of this process, also those that its own children have left to it."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def threads() -> int:
    """How many threads this process has."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1
