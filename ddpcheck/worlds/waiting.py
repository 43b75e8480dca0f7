"""Wait for conditions with a deadline, and for stack dumps of ranks. Light."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def wait_until(holds: Callable[[], object], seconds: float, pause: float = 0.01) -> None:
    """Poll a condition until true, for at most `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(pause)


def ask_for_stacks(files: Sequence[Path], ask: Callable[[], object], seconds: float, quiet: float) -> None:
    """Request stack dumps and wait until no file grows for `quiet` seconds."""
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
    """Return the size of a file in bytes, or 0 if missing."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
