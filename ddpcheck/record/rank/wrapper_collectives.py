"""Record collectives that a wrapper makes in C++, by forward and backward pass."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import user_frame, user_location
from ddpcheck.gather.collectives.collective_log import note_collective
from ddpcheck.gather.collectives.groups import Group, named_group
from ddpcheck.gather.patching import Recorder
from ddpcheck.stream.entries import DDP_BACKWARD, DDP_FORWARD, SHARD_FORWARD, place_of_backward
from ddpcheck.stream.rank_log import RankLog

WITH_BUCKETS = "with the order of buckets"  # DDP forward pass that also exchanges the bucket order
_MOST_LINES = 256


class _Line:
    """Line that calls the wrapper."""

    def __init__(self, location: Location | None) -> None:
        self.location = location
        self.number, self.text = (0, "") if location is None else (location.line, str(location))
        self.forwards = 0  # forward passes with gradients


class WrapperCollectives(Recorder, subjects=("collectives",)):
    """Recorder of one wrapper's collectives and of its forward passes with gradients."""

    def __init__(self, log: RankLog, number: int, which: str) -> None:
        self.forwards = 0
        self._log = log
        self._number = number
        self._which = which  # name of the wrapper in the log if its process group has several
        self._lines: dict[tuple[CodeType, int] | None, _Line] = {}  # by code and line of the innermost program frame
        self._by_location: dict[Location | None, _Line] = {}  # several functions may share a location
        self._last = _Line(None)
        # process group of the last reduction; weak, since a reference keeps the group's threads alive
        self._group: tuple[ref[Any], Group] | None = None
        self._unsynced = 0  # forward passes under no_sync
        self._has_reduced = False

    def forward_returned(self, *, synced: bool) -> None:
        frame = user_frame(sys._getframe(1))
        key = None if frame is None else (frame.f_code, frame.f_lineno)
        line = self._lines.get(key)
        if line is None:
            location = user_location(frame) if frame is not None else None
            if len(self._lines) >= _MOST_LINES:  # code objects may be created anew in each step
                self._lines.clear()
            line = self._lines[key] = self._by_location.setdefault(location, _Line(location))
        self.forwards += 1
        line.forwards += 1
        self._last = line
        self._log.count_forward(self._number, line.number, line.forwards)
        self._unsynced += not synced

    @property
    def code(self) -> CodeType | None:
        """Return the program function that ran the last forward pass with gradients."""
        return next((key[0] for key, line in self._lines.items() if key and line is self._last), None)

    @property
    def line(self) -> Location | None:
        return self._last.location

    def broadcasts(self, wrapper: nn.Module) -> None:
        """Record the buffer broadcast of a DDP forward pass, if any."""
        if isinstance(wrapper, nn.parallel.DistributedDataParallel) and wrapper.will_sync_module_buffers():
            if not wrapper._join_config.enable:  # under Join, a rank without a batch takes part without a forward pass
                labels = [self._which] * bool(self._which) + [WITH_BUCKETS] * self._exchanges(wrapper)
                note_collective(DDP_FORWARD, ", ".join(labels), wrapper.process_group)

    def _exchanges(self, wrapper: nn.parallel.DistributedDataParallel) -> bool:
        """Return True if DDP exchanges the bucket order: first training forward after a backward."""
        searches = wrapper.find_unused_parameters and not wrapper.static_graph
        rebuilt = getattr(wrapper, "_has_rebuilt_buckets", True)
        return self._has_reduced and torch.is_grad_enabled() and not (rebuilt or searches)

    def gathers(self, group: dist.ProcessGroup | None) -> None:
        location = user_location()
        line = self._by_location.get(location, _Line(location))
        place = ""
        if torch.is_grad_enabled():
            place = place_of_backward(line.forwards + 1, line.text, self._unsynced, self._log.batch)
        note_collective(SHARD_FORWARD, self._which, group, place=place)

    def reduces(self, wrapper: nn.Module) -> None:
        """Record the reduction of a DDP backward pass (FSDP2's collectives run in Python)."""
        if not isinstance(wrapper, nn.parallel.DistributedDataParallel) or wrapper._join_config.enable:
            return
        self._has_reduced = True
        group = wrapper.process_group
        if self._group is None or self._group[0]() is not group:
            self._group = ref(group), named_group(group)
        place = place_of_backward(self._last.forwards, self._last.text, self._unsynced, self._log.batch)
        note_collective(DDP_BACKWARD, self._which, known=self._group[1], place=place)
