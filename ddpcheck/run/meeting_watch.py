"""Detect processes that wait in `init_process_group` for ranks that cannot arrive.

No rank can arrive if all processes started by torchrun are already waiting or have ended.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from ddpcheck.findings.evidence.endings import Joining
from ddpcheck.record.rank.started_processes import RAISED, SUFFIX
from ddpcheck.run.living_ranks import is_idle, lives
from ddpcheck.worlds.deadlock import children_of, processor_seconds


def unmet(folder: Path) -> tuple[Joining, ...]:
    """Return the processes left in `init_process_group`, by rank, if any of them raised."""
    raised = _notes(folder, RAISED)
    return tuple(sorted([*raised, *_notes(folder, SUFFIX)], key=_by_rank)) if raised else ()


def _notes(folder: Path, suffix: str) -> list[Joining]:
    notes = []
    for file in folder.glob(f"*{suffix}"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # removed when the process leaves init_process_group
            notes.append(msgspec.json.decode(file.read_bytes(), type=Joining))
    return sorted(notes, key=_by_rank)


def _by_rank(one: Joining) -> tuple[int, int]:
    return one.rank, one.pid


class MeetingWatch:
    """Poll the processes in `init_process_group` for a hang."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._since = 0.0
        self._before: dict[int, float] = {}

    def in_vain(self, now: float, timeout: float) -> tuple[Joining, ...]:
        """Return the processes that have waited in vain for `timeout` seconds, or ()."""
        notes = tuple(note for note in _notes(self._folder, SUFFIX) if lives(note.pid))
        if self._before.keys() != {note.pid for note in notes}:
            self._begin(notes, now)
        if not notes or now - self._since < timeout:
            return ()
        seconds = now - self._since
        waiting = all(is_idle(self._before[note.pid], processor_seconds(note.pid), seconds) for note in notes)
        self._begin(notes, now)
        needed = max(note.started or note.world_size for note in notes)
        missing = needed - len(notes)
        if missing > 0 and all(note.started for note in notes):
            pids = {note.pid for note in notes}
            missing = sum(pid not in pids and lives(pid) for pid in children_of(os.getpid()))
        return notes if waiting and needed > 0 >= missing else ()

    def _begin(self, here: tuple[Joining, ...], now: float) -> None:
        self._since, self._before = now, {note.pid: processor_seconds(note.pid) or 0.0 for note in here}
