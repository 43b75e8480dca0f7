"""Watches the processes that are in `init_process_group`: whether any of those that are to come can still come.

None can where all that torchrun has started are there, or have ended.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ddpcheck.findings.evidence.endings import Joining
from ddpcheck.record.rank.meeting import SUFFIX
from ddpcheck.run.living_ranks import is_idle, lives
from ddpcheck.worlds.deadlock import children_of, processor_seconds


def joining(folder: Path) -> tuple[Joining, ...]:
    """The living processes that are in `init_process_group`, by rank."""
    found = []
    for file in folder.glob(f"*{SUFFIX}"):
        try:
            found.append(msgspec.json.decode(file.read_bytes(), type=Joining))
        except OSError:  # it has just come out
            continue
    return tuple(sorted((one for one in found if lives(one.pid)), key=lambda one: (one.rank, one.pid)))


class MeetingWatch:
    """Looks at them again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._since = 0.0
        self._before: dict[int, float] = {}

    def in_vain(self, now: float, timeout: float) -> tuple[Joining, ...]:
        """Those that wait, if all are there that could come, and none has worked for `timeout` seconds."""
        here = joining(self._folder)
        if self._before.keys() != {one.pid for one in here}:
            self._begin(here, now)
        if not here or now - self._since < timeout:
            return ()
        seconds = now - self._since
        waiting = all(is_idle(self._before[one.pid], processor_seconds(one.pid), seconds) for one in here)
        self._begin(here, now)
        enough = max(one.started or one.world_size for one in here)
        missing = enough - len(here)
        if missing > 0 and all(one.started for one in here):
            pids = {one.pid for one in here}
            missing = sum(pid not in pids and lives(pid) for pid in children_of(os.getpid()))
        return here if waiting and enough > 0 >= missing else ()

    def _begin(self, here: tuple[Joining, ...], now: float) -> None:
        self._since, self._before = now, {one.pid: processor_seconds(one.pid) or 0.0 for one in here}
