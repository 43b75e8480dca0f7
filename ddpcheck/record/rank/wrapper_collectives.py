"""The collectives that a wrapper makes by itself, in C++, written down with the passes of the loop that they are of."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import user_location
from ddpcheck.gather.collectives.collective_log import note_collective
from ddpcheck.gather.ddp.ddp_wrapper import group_of, is_ddp, joins
from ddpcheck.stream.entries import DDP_BACKWARD, DDP_FORWARD, SHARD_FORWARD, place_of_backward
from ddpcheck.stream.rank_log import RankLog

WITH_BUCKETS = "with the order of buckets"  # of a forward pass of DDP's, beside its broadcast of buffers


class WrapperCollectives:
    """Those of one wrapper, and its forward passes that may train, by which its backward passes are told apart.

    Attributes:
        forwards: How many there have been.
        line: Of the last one.
    """

    def __init__(self, log: RankLog, number: int, which: str) -> None:
        """Begin; `which` says in the log which wrapper of its process group it is, where there are several."""
        self.forwards = 0
        self.line: Location | None = None
        self._log = log
        self._number = number
        self._which = which
        self._by_line: dict[Location | None, int] = {}
        self._unsynced = 0  # of them, under no_sync
        self._has_reduced = False

    def forward_returned(self, *, synced: bool) -> None:
        """A forward pass that may train has returned."""
        self.forwards += 1
        self.line = line = user_location()
        made = self._by_line[line] = self._by_line.get(line, 0) + 1
        self._log.count_forward(self._number, line.line if line is not None else 0, made)
        self._unsynced += not synced

    def broadcasts(self, wrapper: nn.Module) -> None:
        """A forward pass of DDP's begins, perhaps with a broadcast of buffers."""
        if isinstance(wrapper, nn.parallel.DistributedDataParallel) and wrapper.will_sync_module_buffers():
            if not wrapper._join_config.enable:  # a rank that has no batch any more takes part without a forward pass
                which = [self._which] * bool(self._which) + [WITH_BUCKETS] * self._exchanges(wrapper)
                note_collective(DDP_FORWARD, ", ".join(which), wrapper.process_group)

    def _exchanges(self, wrapper: nn.parallel.DistributedDataParallel) -> bool:
        """Whether a forward pass exchanges the order of buckets: the first one that trains after a backward pass."""
        searches = wrapper.find_unused_parameters and not wrapper.static_graph
        rebuilt = getattr(wrapper, "_has_rebuilt_buckets", True)
        return self._has_reduced and torch.is_grad_enabled() and not (rebuilt or searches)

    def gathers(self, group: dist.ProcessGroup | None) -> None:
        """A forward pass of a sharded module begins, which gathers its parameters."""
        line = user_location()
        place = self._place(self._by_line.get(line, 0) + 1, line) if torch.is_grad_enabled() else ""
        note_collective(SHARD_FORWARD, self._which, group, place=place)

    def reduces(self, wrapper: nn.Module) -> None:
        """A backward pass that DDP averages begins; what is of shards, torch does in Python."""
        if is_ddp(wrapper) and not joins(wrapper):
            place = self._place(self._by_line.get(self.line, 0), self.line)
            self._has_reduced = True
            note_collective(DDP_BACKWARD, self._which, group_of(wrapper), place=place)

    def _place(self, number: int, line: Location | None) -> str:
        return place_of_backward(number, line, self._unsynced, self._log.batch)
