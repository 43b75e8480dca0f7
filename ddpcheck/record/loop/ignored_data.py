"""Detect assignments to `.data` of shards, which a DTensor ignores without a trace."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch

from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import is_user_file, location_of
from ddpcheck.gather.patching import Patch, Recorder, guarded
from ddpcheck.gather.state.fingerprints import is_shard, own_part
from ddpcheck.record.loop.step_listener import StepListener
from ddpcheck.record.loop.step_recorder import StepRecorder

_CALLER = 3  # frames from the recording function to the assigning line

_open: WeakSet[IgnoredData] = WeakSet()
_patches: list[Patch] = []


class IgnoredData(StepListener, Recorder, subjects=("parameters",)):
    """Recorder of ignored assignments; passes them to `sink` before the next forward pass."""

    def __init__(self, recorder: Callable[[], StepRecorder], sink: Callable[[Sequence[ModuleChanged]], object]) -> None:
        """Begin for the parameters of the `StepRecorder` that `recorder` returns."""
        self._recorder = recorder
        self._sink = sink
        self._found: dict[Location, list[str]] = {}

    def begin(self) -> None:
        """Patch `DTensor.data`; `DTensor` must have been imported."""
        _open.add(self)
        if not _patches:
            _patches.append(Patch(vars(sys.modules["torch.distributed.tensor"])["DTensor"], "data", _followed))

    def close(self) -> None:
        """Stop recording; idempotent."""
        _open.discard(self)
        while _patches and not _open:
            _patches.pop().undo()

    def note(self, shard: torch.Tensor, where: Location) -> None:
        """Record an assignment to `.data` of a shard."""
        name = next((name for name, param in self._recorder().parameters.items() if param is shard), None)
        if name is not None and name not in (names := self._found.setdefault(where, [])):
            names.append(name)

    def forward_begins(self) -> None:
        """Pass the recorded assignments to `sink`."""
        entries, self._found = self._found, {}
        if entries:
            self._sink([ModuleChanged(0, "ignored", ".data =", (*names,), line) for line, names in entries.items()])


def is_ignored(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    """Return True if a shard ignored the value assigned to its `.data`."""
    part = own_part(parameter) if is_shard(parameter) else None
    return part is not None and part.numel() > 0 and part.data_ptr() != own_part(value).data_ptr()


def _followed(original: Any) -> Any:
    note = guarded(_assigned)

    def put(shard: Any, value: Any) -> None:
        original.__set__(shard, value)
        note(shard, value)

    return property(lambda shard: original.__get__(shard), put)


def _assigned(shard: torch.Tensor, value: torch.Tensor) -> None:
    caller = sys._getframe(_CALLER)
    if is_user_file(caller.f_code.co_filename) and is_ignored(shard, value):
        for recorder in [*_open]:
            recorder.note(shard, location_of(caller))
