"""The files that a script writes with `torch.save` and reads with `torch.load`."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable
from typing import Any

import torch

from ddpcheck.findings.evidence.script import FileUsed
from ddpcheck.findings.source_lines import user_location
from ddpcheck.monitor.module_hooks import guarded
from ddpcheck.recipe.pytree import tree_tensors


class FileRecorder:
    """Follows `torch.save` and `torch.load`; hands each use of a file to `sink`."""

    def __init__(self, sink: Callable[[FileUsed], object], collectives: Callable[[], int]) -> None:
        """Begin; `collectives` says how many of all ranks this rank has come to."""
        self._sink = sink
        self._collectives = collectives
        torch.save = self._followed(torch.save, 1, "f", writes=True)
        torch.load = self._followed(torch.load, 0, "f", writes=False)

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
