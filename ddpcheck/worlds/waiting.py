"""Waiting until something holds, with a deadline, and for the stacks that ranks write when they are asked. Light."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def wait_until(holds: Callable[[], object], seconds: float, pause: float = 0.01) -> None:
    """Wait until a condition holds, for some seconds at most."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(pause)


def ask_for_stacks(files: Sequence[Path], ask: Callable[[], object], seconds: float, quiet: float) -> None:
    """Have ranks write their stacks into these files, and wait until none has grown for `quiet` seconds."""
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
    """How many bytes a file has; 0 where it is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
