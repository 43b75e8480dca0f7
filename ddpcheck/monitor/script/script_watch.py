"""`ScriptWatch`: a watch that writes down what it would exchange with the other ranks.

It asks no other rank and touches nothing of the script: no collective, no wait, no gradient of zeros where one is
missing. What it writes is judged with the logs of the other ranks when the script has ended.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ddpcheck.findings.report import Finding
from ddpcheck.findings.source_lines import is_user_file, user_location
from ddpcheck.gather.collectives.collective_log import note_collective
from ddpcheck.gather.ddp.ddp_wrapper import hook_loss
from ddpcheck.gather.steps.gradient_distance import dense, eps_of
from ddpcheck.gather.steps.gradient_sketch import sketch
from ddpcheck.monitor.alarms import AlarmBoard
from ddpcheck.monitor.forward_snapshot import Snapshot
from ddpcheck.monitor.judging import WatchContext
from ddpcheck.monitor.options import WatchOptions
from ddpcheck.monitor.rank_report import RankReport
from ddpcheck.monitor.replica_comparison import ReplicaComparison
from ddpcheck.monitor.script.rank_log import RankFound, RankLog, ReplicaCaptured, StepsReported, WrapperMade
from ddpcheck.monitor.step_probe import StepProbe
from ddpcheck.monitor.synced_parameters import SyncedParameters
from ddpcheck.monitor.watch import Watch


class ScriptWatch(Watch):
    """The watch on one wrapper of a script, which is the `number`-th that this rank has constructed."""

    _completes = False
    _keep = staticmethod(sketch)

    def __init__(
        self, wrapper: nn.parallel.DistributedDataParallel, options: WatchOptions, log: RankLog, number: int
    ) -> None:
        self._log = log
        self._number = number
        super().__init__(wrapper, options)
        self._comparison = _ReplicaRecorder(
            self._module, self._tracker.parameters, self._context, self._alarms, log, number
        )
        log.add(
            WrapperMade(
                type(self._module).__qualname__, self._alarms.ranks, self._context, user_location(), _classes(wrapper)
            )
        )

    def _make_board(self, group: Any) -> AlarmBoard:
        return _SilentBoard(group)

    def _report(self, findings: Iterable[Finding]) -> None:
        if found := tuple(findings):
            self._log.add(RankFound(self._number, tuple(map(self._locate, found))))

    def _judge(self, reports: Sequence[RankReport], *, settled: bool = False) -> None:
        self._log.add(StepsReported(self._number, reports[0], closing=settled))

    def _exchange_reports(
        self, step: int, probe: StepProbe | None, snapshot: Snapshot | None, *, thorough: bool
    ) -> list[Finding]:
        mine = self._own_report(step, probe, snapshot, thorough=thorough)
        self._history.note_reported([mine])
        self._log.add(StepsReported(self._number, mine))
        return []

    def backward_begins(self) -> None:
        super().backward_begins()
        wrapper = self._tracker.wrapper
        if wrapper is not None:
            note_collective("DistributedDataParallel.backward", "", wrapper.process_group)
        self._log.count(self._number, self.step + 1, self.step)

    def step_ended(self, step: int, unused: frozenset[str], awaited: frozenset[str], snapshot: Snapshot | None) -> None:
        super().step_ended(step, unused, awaited, snapshot)
        self._log.count(self._number, step + 1, step + 1)


class _SilentBoard(AlarmBoard):
    """Stands for the other ranks, none of which is asked: an alarm is for this rank to write its report."""

    def __init__(self, group: Any) -> None:
        self.rank = dist.get_rank()
        self.ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        self.silent = ()
        self._posted = False
        self._began = time.monotonic()

    @property
    def open(self) -> bool:
        return False

    def post(self, step: int) -> None:
        self._posted = True

    def is_posted(self, step: int) -> bool:
        posted, self._posted = self._posted, False
        return posted


class _ReplicaRecorder(ReplicaComparison):
    """Writes down what a comparison would compare."""

    def __init__(
        self,
        module: nn.Module,
        synced: SyncedParameters,
        context: WatchContext,
        alarms: AlarmBoard,
        log: RankLog,
        number: int,
    ) -> None:
        super().__init__(module, synced, context, alarms, keeps_start=False)
        self._log = log
        self._number = number

    def compare(self, step: int, *, after_backward: bool, probe: StepProbe | None = None) -> list[Finding]:
        state = self.capture(step, after_backward=after_backward)
        if self._context.broadcasts_buffers:
            theirs = _batch_statistics(self._module)
            buffers = {name: value for name, value in state.values.buffers.items() if name not in theirs}
            state = replace(state, values=replace(state.values, buffers=buffers))
        captured = ReplicaCaptured(self._number, step, state)
        wrapper = self._synced.wrapper
        if probe is not None and probe.keep is not None and wrapper is not None:
            lossy = hook_loss(wrapper)
            tensors = dict(zip(self._synced.names, self._synced.tensors, strict=True))
            left = {name: sketch(dense(p.grad)) for name, p in tensors.items() if p.grad is not None}
            eps = {name: max(eps_of(tensor.dtype), lossy) for name, tensor in tensors.items()}
            captured = replace(captured, own=_plain(probe.local), averaged=_plain(left), eps=eps)
        self._log.add(captured)
        return []


def _batch_statistics(module: nn.Module) -> set[str]:
    """The buffers of normalisation layers: that each rank takes them from its own samples is DDP's plain way."""
    return {
        f"{path}.{name}".lstrip(".")
        for path, part in module.named_modules()
        if isinstance(part, _NormBase)
        for name, _ in part.named_buffers(recurse=False)
    }


def _plain(sketches: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    """The numbers, with one transfer from the device for all of them."""
    if not sketches:
        return {}
    numbers = iter(torch.cat([one.double() for one in sketches.values()]).tolist())
    return {name: [next(numbers) for _ in range(len(one))] for name, one in sketches.items()}


def _classes(wrapper: nn.parallel.DistributedDataParallel) -> dict[str, tuple[tuple[str, str], ...]]:
    found = {}
    for path, part in wrapper.module.named_modules():
        kinds = [(_file_of(kind), kind.__qualname__) for kind in type(part).__mro__]
        if theirs := tuple((file, name) for file, name in kinds if file):
            found[path] = theirs
    return found


def _file_of(kind: type) -> str:
    try:
        file = inspect.getfile(kind)
    except (OSError, TypeError):
        return ""
    return file if is_user_file(file) else ""
