"""Record files that a script saves, loads, or reads soon after a write."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from ddpcheck.findings.evidence.script import FilesLeft, FileUsed
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import frames_from, is_installed, is_user_file, location_of, user_location
from ddpcheck.gather.ddp.sharding import shard_position
from ddpcheck.gather.patching import Recorder, guarded, patched
from ddpcheck.recipe.pytree import tree_tensors
from ddpcheck.record.recording import Recording
from ddpcheck.stream.rank_log import RankLog

_MOST_USES = 4096  # distinct uses, by path, mode, line and number of collectives
_SHARED_MEMORY = "pym-"  # file name prefix of shared memory of `multiprocessing`
_MOST_LOOKS = 1 << 14  # files opened for reading that are checked
_MOST_READS = 8  # recorded reads per file
_STARTED = 30.0  # seconds; another rank may start writing this long before this process starts
_LOCKS = ("fcntl.flock", "fcntl.lockf")
_NOT_GIVEN = object()
_NO_FILES = ("/dev/", "/proc/", "/sys/")
_WRITERS = re.compile(r"-packages.(numpy|pandas|yaml|joblib|omegaconf|safetensors)\b")


class FileRecorder(Recorder, subjects=("files",)):
    """Recorder of `torch.save`, `torch.load` and `open`."""

    def __init__(self, run: Recording) -> None:
        self._log: RankLog = run.log
        self._watches = run.watches
        self._known: set[tuple[object, ...]] = set()
        patched(torch, "save", self._saves)
        patched(torch, "load", self._loads)
        self._started = time.time() - _STARTED
        self._looks = 0
        self._reads: Counter[str] = Counter()
        self._locked = -1  # collectives before the last attempt to lock a file, which waits for other ranks
        self._opened: dict[str, int] = {}  # last size in bytes of files opened for writing, by path; -1 if unknown
        note, note_lock = guarded(self._note_opened), guarded(self._note_lock)
        note_removed = guarded(self._note_removed)

        def hear(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open":
                note(*arguments)
            elif event in _LOCKS:
                note_lock()
            elif event == "os.remove":
                note_removed(*arguments)

        sys.addaudithook(hear)

    def close(self) -> None:
        for name in self._opened:
            self._note_size(name)
        if sizes := {name: size for name, size in self._opened.items() if size >= 0}:
            self._log.add(FilesLeft(sizes))

    def _saves(self, obj: Any, f: Any, *_arguments: Any, **_named: Any) -> Iterator[None]:
        began = self._log.collectives, self._log.waited
        sharded = [watch.parameters for watch in list(self._watches) if watch.is_sharded]
        shard = next((candidate for params in sharded if (candidate := shard_position(obj, params)) is not None), None)
        self._note(f, began, None, writes=True, shard=shard)  # recorded early: this rank may be killed during the save
        yield
        self._note(f, began, None, writes=True, shard=shard)

    def _loads(self, f: Any, map_location: Any = _NOT_GIVEN, *_arguments: Any, **_named: Any) -> Iterator[None]:
        began = self._log.collectives, self._log.waited
        loaded = None
        try:
            loaded = yield
            self._log.loads += 1
        finally:  # also if it raises, e.g. on a truncated file
            self._note(f, began, loaded, writes=False, mapped=map_location is not _NOT_GIVEN)

    def _note(
        self,
        file: Any,
        before: tuple[int, bool],
        loaded: Any,
        *,
        writes: bool,
        mapped: bool = True,
        shard: tuple[int, int] | None = None,
    ) -> None:
        path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
        if not isinstance(path, str | os.PathLike):
            return
        if not os.path.isfile(path) and (os.path.exists(path) or not writes):
            return
        devices = {str(tensor.device) for tensor in tree_tensors(loaded)}
        self._write(
            FileUsed(
                os.path.realpath(path),
                writes,
                before[0],
                self._log.collectives,
                user_location(),
                devices=tuple(sorted(devices)),
                device=f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else "cpu",
                mapped=mapped,
                waited=before[1],
                shard=shard,
            )
        )

    def _write(self, use: FileUsed) -> None:
        key = use.path, use.writes, use.location, use.began, use.ended, use.waited
        if key not in self._known and len(self._known) < _MOST_USES:
            self._known.add(key)
            self._log.add(use)

    def _write_other(self, path: str, line: Location | None, *, waited: bool, writes: bool = False) -> None:
        now = self._log.collectives
        self._write(FileUsed(path, writes, now, now, line, waited=waited, by_torch=False))

    def _note_lock(self) -> None:
        self._locked = self._log.collectives

    def _note_opened(self, path: Any, mode: Any, flags: int) -> None:
        """Record a file that the program truncates, reads, or creates without a mode."""
        if not isinstance(path, str | os.PathLike) or os.path.basename(path).startswith(_SHARED_MEMORY):
            return
        if isinstance(mode, str) and mode.startswith("w"):
            name = os.path.realpath(path)
            if not name.startswith(_NO_FILES) and _line_of_program(by_torch=True) is not None:
                self._write_other(name, user_location(), writes=True, waited=self._log.waited)
                if len(self._opened) < _MOST_USES:
                    self._opened.setdefault(name, -1)
        elif isinstance(mode, str) and mode.startswith("r"):
            self._note_read(path)
        elif mode is None and flags & os.O_CREAT:
            if flags & os.O_EXCL:  # succeeds on one rank only
                self._note_lock()
            if (line := _line_of_program()) is not None:  # a marker file may signal that another file is complete
                self._write_other(os.path.realpath(path), line, waited=True)

    def _note_removed(self, path: Any, *_folder: int) -> None:
        """Record file sizes before a removal, by base name (`dir_fd` paths are relative)."""
        basename = os.path.basename(os.fsdecode(path))
        for name in self._opened:
            if os.path.basename(name) == basename:
                self._note_size(name)

    def _note_size(self, name: str) -> None:
        with contextlib.suppress(OSError):  # the file no longer exists
            self._opened[name] = os.stat(name).st_size

    def _note_read(self, path: str | os.PathLike[str]) -> None:
        """Record a read of a recently modified file, which another rank may be writing."""
        if self._looks >= _MOST_LOOKS:
            return
        self._looks += 1
        try:
            file_stat = os.stat(path)
        except OSError:  # no such file: the program's own call raises
            return
        if file_stat.st_mtime < self._started or not stat.S_ISREG(file_stat.st_mode):
            return
        name = os.path.realpath(path)
        if name.startswith(_NO_FILES) or name.endswith(".py") or self._reads[name] >= _MOST_READS:  # skip source files
            return
        if (line := _line_of_program()) is not None:
            self._reads[name] += 1
            waited = self._log.waited or self._locked == self._log.collectives
            self._write_other(name, line, waited=waited)


def _line_of_program(*, by_torch: bool = False) -> Location | None:
    """Return the program line that uses a file, directly or through an I/O library.

    Returns None if another package uses the file. `by_torch`: also accept a use by torch for the program.
    """
    for frame in frames_from(sys._getframe(1)):
        file = frame.f_code.co_filename
        if not by_torch and str(frame.f_globals.get("__name__", "")).startswith("torch."):
            return None
        if is_user_file(file) and not _WRITERS.search(file):
            return None if is_installed(file) else location_of(frame)
    return None
