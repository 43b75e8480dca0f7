"""The files that a script writes with `torch.save` and reads with `torch.load`, and others that it writes."""

from __future__ import annotations

import functools
import os
import re
import stat
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from ddpcheck.findings.evidence.script import FileUsed
from ddpcheck.findings.source_lines import is_installed, is_user_file, user_location
from ddpcheck.monitor.module_hooks import guarded
from ddpcheck.recipe.pytree import tree_tensors

_NO_FILES = ("/dev/", "/proc/", "/sys/")
_WRITERS = re.compile(r"-packages.(numpy|pandas|yaml|joblib|omegaconf|safetensors)\b")


class FileRecorder:
    """Follows `torch.save`, `torch.load` and `open`; hands each use of a file to `sink`."""

    def __init__(self, sink: Callable[[FileUsed], object], collectives: Callable[[], int]) -> None:
        """Begin; `collectives` says how many of all ranks this rank has come to."""
        self._sink = sink
        self._collectives = collectives
        torch.save = self._followed(torch.save, 1, "f", writes=True)
        torch.load = self._followed(torch.load, 0, "f", writes=False)
        note = guarded(self._note_opened)
        sys.addaudithook(lambda event, given: note(*given) if event == "open" else None)

    def _followed(self, original: Any, place: int, name: str, *, writes: bool) -> Any:
        note = guarded(self._note)

        @functools.wraps(original)
        def call(*arguments: Any, **named: Any) -> Any:
            began = self._collectives()
            result = original(*arguments, **named)
            file = named[name] if name in named else arguments[place]
            mapped = len(arguments) > 1 or "map_location" in named
            note(file, began, None if writes else result, writes=writes, mapped=mapped)
            return result

        return call

    def _note(self, file: Any, began: int, loaded: Any, *, writes: bool, mapped: bool) -> None:
        path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
        if not isinstance(path, str | os.PathLike) or not stat.S_ISREG(os.stat(path).st_mode):
            return
        devices = {str(tensor.device) for tensor in tree_tensors(loaded)}
        self._sink(
            FileUsed(
                os.path.realpath(path),
                writes,
                began,
                self._collectives(),
                user_location(),
                devices=tuple(sorted(devices)),
                device=f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else "cpu",
                mapped=mapped,
            )
        )

    def _note_opened(self, path: Any, mode: Any, flags: int) -> None:
        """Python opens a file: one that the program empties in order to write it is written."""
        if not isinstance(mode, str) or not mode.startswith("w") or not isinstance(path, str | os.PathLike):
            return
        name = os.path.realpath(path)
        if not name.startswith(_NO_FILES) and _is_of_program():
            now = self._collectives()
            self._sink(FileUsed(name, True, now, now, user_location(), by_torch=False))


def _is_of_program() -> bool:
    """Whether the program writes the file, itself or by a library that is for that; and no package on its behalf."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_file(file) and not _WRITERS.search(file):
            return not is_installed(file)
        frame = frame.f_back
    return False
