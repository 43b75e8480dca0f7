"""The files that a script writes with `torch.save` and reads with `torch.load`, and others that it writes."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from ddpcheck.findings.evidence.script import FileUsed
from ddpcheck.findings.source_lines import is_installed, is_user_file, user_location
from ddpcheck.gather.patching import guarded, patched
from ddpcheck.recipe.pytree import tree_tensors
from ddpcheck.stream.rank_log import RankLog

_MOST_USES = 4096  # distinct ones: by path, how, line, and collectives before
_NOT_GIVEN = object()
_NO_FILES = ("/dev/", "/proc/", "/sys/")
_WRITERS = re.compile(r"-packages.(numpy|pandas|yaml|joblib|omegaconf|safetensors)\b")


class FileRecorder:
    """Follows `torch.save`, `torch.load` and `open`; writes each use of a file to the log of the rank."""

    def __init__(self, log: RankLog) -> None:
        """Begin."""
        self._log = log
        self._known: set[tuple[object, ...]] = set()
        patched(torch, "save", self._saves)
        patched(torch, "load", self._loads)
        note = guarded(self._note_opened)
        sys.addaudithook(lambda event, given: note(*given) if event == "open" else None)

    def _saves(self, _held: Any, f: Any, *_arguments: Any, **_named: Any) -> Iterator[None]:
        began = self._log.collectives, self._log.waited
        yield
        self._note(f, began, None, writes=True)

    def _loads(self, f: Any, map_location: Any = _NOT_GIVEN, *_arguments: Any, **_named: Any) -> Iterator[None]:
        began = self._log.collectives, self._log.waited
        self._note(f, began, (yield), writes=False, mapped=map_location is not _NOT_GIVEN)

    def _note(self, file: Any, before: tuple[int, bool], loaded: Any, *, writes: bool, mapped: bool = True) -> None:
        path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
        if not isinstance(path, str | os.PathLike) or not stat.S_ISREG(os.stat(path).st_mode):
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
            )
        )

    def _write(self, use: FileUsed) -> None:
        key = use.path, use.writes, use.location, use.began, use.ended, use.waited
        if key not in self._known and len(self._known) < _MOST_USES:
            self._known.add(key)
            self._log.add(use)

    def _note_opened(self, path: Any, mode: Any, flags: int) -> None:
        """Python opens a file: one that the program empties in order to write it is written."""
        if not isinstance(mode, str) or not mode.startswith("w") or not isinstance(path, str | os.PathLike):
            return
        name = os.path.realpath(path)
        if not name.startswith(_NO_FILES) and _is_of_program():
            now, waited = self._log.collectives, self._log.waited
            self._write(FileUsed(name, True, now, now, user_location(), waited=waited, by_torch=False))


def _is_of_program() -> bool:
    """Whether the program writes the file, itself or by a library that is for that; and no package on its behalf."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_file(file) and not _WRITERS.search(file):
            return not is_installed(file)
        frame = frame.f_back
    return False
