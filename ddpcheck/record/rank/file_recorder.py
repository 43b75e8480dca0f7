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

from ddpcheck.findings.evidence.script import FileSizes, FileUsed
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import frames_from, is_installed, is_user_file, location_of, user_location
from ddpcheck.gather.ddp.sharding import shard_position
from ddpcheck.gather.patching import Recorder, guarded, patched
from ddpcheck.recipe.pytree import tree_tensors
from ddpcheck.record.recording import Recording
from ddpcheck.stream.rank_log import RankLog

_MOST_USES = 4096  # distinct uses, by path, mode, line and number of collectives
_SHARED_MEMORY = "pym-"  # file name prefix of shared memory of `multiprocessing`
_MOST_CHECKS = 1 << 14  # files opened for reading that are checked
_MOST_READS = 8  # recorded reads per file
_EARLY_SECONDS = 30.0  # seconds; another rank may start writing this long before this process starts
_LOCKS = ("fcntl.flock", "fcntl.lockf")
_MISSING = object()
_SYSTEM = ("/dev/", "/proc/", "/sys/")
_WRITERS = re.compile(r"-packages.(numpy|pandas|yaml|joblib|omegaconf|safetensors)\b")


class FileRecorder(Recorder, subjects=("files",)):
    """Recorder of files that `torch.save`, `torch.load` and `open` use."""

    def __init__(self, run: Recording) -> None:
        self._log: RankLog = run.log
        self._watches = run.watches
        self._written_keys: set[tuple[object, ...]] = set()
        patched(torch, "save", self._record_save)
        patched(torch, "load", self._record_load)
        self._started = time.time() - _EARLY_SECONDS
        self._check_count = 0
        self._reads: Counter[str] = Counter()
        self._collectives_at_lock = -1  # at the last attempt to lock a file, which waits for other ranks
        self._sizes: dict[str, int] = {}  # last size in bytes of files opened for writing, by path; -1 if unknown
        note, note_lock = guarded(self._record_open), guarded(self._record_lock)
        note_removed = guarded(self._record_removal)

        def record_event(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open":
                note(*arguments)
            elif event in _LOCKS:
                note_lock()
            elif event == "os.remove":
                note_removed(*arguments)

        sys.addaudithook(record_event)

    def close(self) -> None:
        for name in self._sizes:
            self._keep_size(name)
        if sizes := {name: size for name, size in self._sizes.items() if size >= 0}:
            self._log.add(FileSizes(sizes))

    def _record_save(self, obj: Any, f: Any, *_arguments: Any, **_named: Any) -> Iterator[None]:
        began = self._log.collectives, self._log.waited
        sharded = [watch.parameters for watch in list(self._watches) if watch.is_sharded]
        shard = next((candidate for params in sharded if (candidate := shard_position(obj, params)) is not None), None)
        self._record_torch_use(f, began, None, writes=True, shard=shard)  # this rank may be killed in `save`
        yield
        self._record_torch_use(f, began, None, writes=True, shard=shard)

    def _record_load(self, f: Any, map_location: Any = _MISSING, *_arguments: Any, **_named: Any) -> Iterator[None]:
        began = self._log.collectives, self._log.waited
        loaded = None
        try:
            loaded = yield
            self._log.loads += 1
        finally:  # also if it raises, e.g. on a truncated file
            self._record_torch_use(f, began, loaded, writes=False, mapped=map_location is not _MISSING)

    def _record_torch_use(
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
        self._write_once(
            FileUsed(
                os.path.realpath(path),
                writes,
                before[0],
                self._log.collectives,
                user_location(),
                devices=tuple(sorted(devices)),
                device=f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else "cpu",
                maps_location=mapped,
                has_waited=before[1],
                shard=shard,
            )
        )

    def _write_once(self, use: FileUsed) -> None:
        key = use.path, use.writes, use.location, use.began, use.ended, use.has_waited
        if key not in self._written_keys and len(self._written_keys) < _MOST_USES:
            self._written_keys.add(key)
            self._log.add(use)

    def _write_use(self, path: str, line: Location | None, *, waited: bool, writes: bool = False) -> None:
        now = self._log.collectives
        self._write_once(FileUsed(path, writes, now, now, line, has_waited=waited, by_torch=False))

    def _record_lock(self) -> None:
        self._collectives_at_lock = self._log.collectives

    def _record_open(self, path: Any, mode: Any, flags: int) -> None:
        """Record `open` that truncates or reads a file, or `os.open` that creates one."""
        if not isinstance(path, str | os.PathLike) or os.path.basename(path).startswith(_SHARED_MEMORY):
            return
        if isinstance(mode, str) and mode.startswith("w"):
            name = os.path.realpath(path)
            if not name.startswith(_SYSTEM) and _line_of_program(by_torch=True) is not None:
                self._write_use(name, user_location(), writes=True, waited=self._log.waited)
                if len(self._sizes) < _MOST_USES:
                    self._sizes.setdefault(name, -1)
        elif isinstance(mode, str) and mode.startswith("r"):
            self._record_read(path)
        elif mode is None and flags & os.O_CREAT:
            if flags & os.O_EXCL:  # succeeds on one rank only
                self._record_lock()
            if (line := _line_of_program()) is not None:  # a marker file may signal that another file is complete
                self._write_use(os.path.realpath(path), line, waited=True)

    def _record_removal(self, path: Any, *_folder: int) -> None:
        """Keep a removed file's size, matched by base name since paths may be relative."""
        basename = os.path.basename(os.fsdecode(path))
        for name in self._sizes:
            if os.path.basename(name) == basename:
                self._keep_size(name)

    def _keep_size(self, name: str) -> None:
        with contextlib.suppress(OSError):  # the file no longer exists
            self._sizes[name] = os.stat(name).st_size

    def _record_read(self, path: str | os.PathLike[str]) -> None:
        """Record a read of a recently modified file, which another rank may be writing."""
        if self._check_count >= _MOST_CHECKS:
            return
        self._check_count += 1
        try:
            file_stat = os.stat(path)
        except OSError:  # no such file: the program's own call raises
            return
        if file_stat.st_mtime < self._started or not stat.S_ISREG(file_stat.st_mode):
            return
        name = os.path.realpath(path)
        if name.startswith(_SYSTEM) or name.endswith(".py") or self._reads[name] >= _MOST_READS:
            return
        if (line := _line_of_program()) is not None:
            self._reads[name] += 1
            waited = self._log.waited or self._collectives_at_lock == self._log.collectives
            self._write_use(name, line, waited=waited)


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
