"""`ScriptWatch`: a watch that writes down what it would exchange with the other ranks.

It asks no other rank and touches nothing of the script: no collective, no wait, no gradient of zeros where one is
missing. What it writes is judged with the logs of the other ranks when the script has ended.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.evidence.parameters import StepEvidence
from ddpcheck.findings.evidence.script import Inputs
from ddpcheck.findings.evidence.steps import LoopEvent
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.source_lines import is_called_by_a_package, is_user_file, user_location
from ddpcheck.gather.collectives.collective_log import note_collective
from ddpcheck.gather.state.fingerprints import fingerprint
from ddpcheck.gather.state.module_description import module_entries
from ddpcheck.gather.steps.gradient_distance import dense, norms
from ddpcheck.gather.steps.gradient_sketch import Kept
from ddpcheck.gather.steps.training_step import batch_fingerprint, sample_fingerprints
from ddpcheck.judge.collective_order import DDP_BACKWARD, DDP_FORWARD
from ddpcheck.judge.ending_facts import place_of_backward
from ddpcheck.monitor.alarms import AlarmBoard
from ddpcheck.monitor.forward_snapshot import Snapshot
from ddpcheck.monitor.module_hooks import UnpickledHook
from ddpcheck.monitor.options import WatchOptions
from ddpcheck.monitor.script.recording.added_noise import added_to
from ddpcheck.monitor.script.recording.bypass_recorder import BypassRecorder
from ddpcheck.monitor.script.recording.pace_recorder import PaceRecorder, Position
from ddpcheck.monitor.script.recording.replica_recorder import ReplicaRecorder
from ddpcheck.monitor.step_probe import StepProbe
from ddpcheck.monitor.watch import Watch
from ddpcheck.recipe.pytree import tree_tensors
from ddpcheck.stream.entries import StepsReported, WrapperMade
from ddpcheck.stream.rank_log import RankLog
from ddpcheck.stream.rank_report import RankReport, is_probed, is_sampled

_MOST_PARTS = 16  # tensors that forward is given
_DISCARDED_STEPS = 2  # optimizer steps, one after the other, before which gradients were thrown away


class ScriptWatch(Watch):
    """The watch on one wrapper of a script, which is the `number`-th that this rank has constructed."""

    _completes = False
    _settles_at_end = True
    _keep = staticmethod(Kept.of)

    def __init__(
        self,
        wrapper: nn.parallel.DistributedDataParallel,
        options: WatchOptions,
        log: RankLog,
        number: int,
        note_changes: Callable[[ScriptWatch, Sequence[str]], None],
        position: Callable[[], Position],
        samples: Callable[[], Sequence[torch.Tensor]],
        *,
        began_alike: bool,
        of_group: int = 1,
    ) -> None:
        self._log = log
        self.number = number
        self._which = f"wrapper {of_group}" if of_group > 1 else ""  # of those of its process group
        self.forwards = 0  # that may train
        self._by_line: dict[Location | None, int] = {}  # these, by their line
        self._unsynced = 0  # of them, under no_sync
        self._note_changes = note_changes
        self._samples = samples
        self._pace = PaceRecorder(number, position, log.add)
        self._through_forward = False  # the backward pass that runs comes from what the wrapper has returned
        self._incomplete = False  # the last reduction, which waits for gradients that have not come
        self._forward_line: Location | None = None
        self._fresh: dict[str, torch.Tensor] = {}  # parameters whose averaged gradient was not zero
        self._zeroed = False  # by zero_grad, since the last optimizer step
        self._discarded = 0  # optimizer steps before which all of these were thrown away by it
        super().__init__(wrapper, options, began_alike=began_alike)
        self._comparison: ReplicaRecorder = ReplicaRecorder(
            self._module, self._tracker.parameters, self._context, self._alarms, log, number
        )
        self._paths = {id(part): path for path, part in self._module.named_modules()}
        self._bypass = BypassRecorder(self._module, self._tracker.parameters.tensors)
        self._handle = wrapper.register_forward_pre_hook(UnpickledHook(functools.partial(_note_broadcast, self._which)))
        log.add(
            WrapperMade(
                type(self._module).__qualname__,
                self._alarms.ranks,
                self._context,
                user_location(),
                is_called_by_a_package(),
                _classes(wrapper),
                module_entries(self._module) if number == 0 and dist.get_rank() == 0 else (),
            )
        )

    @property
    def module(self) -> nn.Module:
        """What is wrapped."""
        return self._module

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Those that the wrapper synchronises, by name."""
        return self._parameters

    @property
    def wrapped(self) -> Iterator[torch.Tensor]:
        """All parameters in the wrapper, also those that have come later, or that it was told to ignore."""
        return iter(()) if self._tracker.wrapper is None else self._tracker.wrapper.parameters()

    def module_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters of the wrapped module as it is now, by name."""
        return self._module.named_parameters()

    def path_of(self, module: nn.Module) -> str | None:
        """Where a module was in the wrapped one when that was wrapped; `None` for another."""
        return self._paths.get(id(module))

    @property
    def is_sampled(self) -> bool:
        """Whether the step that is under way is looked at."""
        return self._is_sampled(self.step)

    @property
    def has_unreduced(self) -> bool:
        """Whether a parameter has what backward passes have added since the last reduction, or that has not ended."""
        return bool(self._tracker.unreduced) or self._incomplete

    @property
    def joins(self) -> bool:
        """Whether ranks without further batches may have left the loop (`Join`)."""
        wrapper = self._tracker.wrapper
        return wrapper is not None and bool(wrapper._join_config.enable)

    @property
    def are_apart(self) -> bool:
        """Whether ranks may have left the loop, or train apart on purpose (post-local SGD)."""
        return self._are_apart()

    def gradients_zeroed(self) -> None:
        """`zero_grad` is called on the wrapper, or on an optimizer that holds some of its parameters."""
        self._zeroed = True

    def any_backward_begins(self) -> None:
        """A backward pass of the script begins, of whatever."""
        self._through_forward = False
        self._bypass.backward_begins(self.step)

    def any_backward_ended(self) -> None:
        """It has ended."""
        self._bypass.backward_ended(self.step, put_off=self._through_forward or self.has_unreduced or self.joins)

    def optimizer_steps(self) -> None:
        """An optimizer with parameters of the wrapper is about to step."""
        self._comparison.write()
        if self._bypass.steps() and self._alarms.has_others:
            self._unaveraged(under_no_sync=False)
        fresh, self._fresh = self._fresh, {}
        zeroed, self._zeroed = self._zeroed, False
        if not fresh or not zeroed:
            return
        thrown_away = all(p.grad is None or not bool(dense(p.grad).count_nonzero()) for p in fresh.values())
        self._discarded = self._discarded + 1 if thrown_away else 0
        if self._discarded == _DISCARDED_STEPS:
            self._tell(LoopEvent("zero_grad", location=str(user_location() or ""), discarded=tuple(fresh)))

    def close(self, *, failing: bool = False) -> None:
        """As of `Watch`."""
        self._comparison.write()
        self._handle.remove()
        self._bypass.close()
        super().close(failing=failing)

    def _make_board(self, group: Any) -> AlarmBoard:
        return _SilentBoard(group)

    def _inside(self) -> str:
        return str(self._bypass.line or "")

    def _tell(self, *events: LoopEvent) -> None:
        report = RankReport(StepEvidence(self._alarms.rank, self.step, {}), events=events)
        self._log.add(StepsReported(self.number, report, alone=True))

    def _judge(self, reports: Sequence[RankReport], *, settled: bool = False) -> None:
        self._log.add(StepsReported(self.number, reports[0], closing=settled))

    def _exchange_reports(
        self, step: int, probe: StepProbe | None, snapshot: Snapshot | None, *, thorough: bool
    ) -> list[Finding]:
        mine = self._own_report(step, probe, snapshot, thorough=thorough)
        self._history.note_reported([mine])
        if mine.changes:
            self._note_changes(self, tuple(mine.changes.values()))
        self._log.add(StepsReported(self.number, mine))
        return []

    def forward_returned(self, step: int, output: Any, tensors: Sequence[torch.Tensor], *, synced: bool) -> None:
        super().forward_returned(step, output, tensors, synced=synced)
        self.forwards += 1
        line = self._forward_line = user_location()
        made = self._by_line[line] = self._by_line.get(line, 0) + 1
        self._log.count_forward(self.number, line.line if line is not None else 0, made)
        self._unsynced += not synced
        if (wrapper := self._tracker.wrapper) is not None and wrapper.training:
            self._pace.forward()

    def _is_due(self, every: int, step: int) -> bool:
        """Also in the first steps: of a short run, one step would say nothing of what changes."""
        return bool(every) and is_sampled(step, every) and not self._are_apart()

    def _is_sampled(self, step: int) -> bool:
        return is_probed(step) or self._is_due(self._options.check_consistency_every, step)

    def backward_begins(self) -> None:
        super().backward_begins()
        self._through_forward = True
        wrapper = self._tracker.wrapper
        if wrapper is not None and not wrapper._join_config.enable:
            line = self._forward_line
            place = place_of_backward(self._by_line.get(line, 0), line, self._unsynced, self._log.batch)
            note_collective(DDP_BACKWARD, self._which, wrapper.process_group, place=place)
        self._log.count(self.number, self.step + 1, self.step)

    def step_ended(self, step: int, unused: frozenset[str], awaited: frozenset[str], snapshot: Snapshot | None) -> None:
        super().step_ended(step, unused, awaited, snapshot)
        self._incomplete = bool(awaited)
        if not self.joins:
            self._pace.reduced(step)
        if self._is_sampled(step):
            gradients = {n: p for n, p in self._parameters.items() if p.grad is not None}
            sizes = norms({n: p.grad for n, p in gradients.items() if p.grad is not None})
            self._fresh = {name: gradients[name] for name, size in sizes.items() if 0 < size < math.inf}
            given = None if snapshot is None else (snapshot.arguments, dict(snapshot.named))
            if (
                given is not None
                and not _are_indices(given)
                and (samples := sample_fingerprints(given) or batch_fingerprint(given))
            ):
                tensors = itertools.islice(tree_tensors(given), _MOST_PARTS)
                parts = tuple((fingerprint(tensor), tensor.numel()) for tensor in tensors if tensor.numel())
                added = added_to(self._samples(), given)
                self._log.add(Inputs(self.number, step, samples, self._forward_line, parts, added))
        self._log.count(self.number, step + 1, step + 1)


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


def _note_broadcast(which: str, wrapper: nn.Module, _arguments: Any) -> None:
    """Log the broadcast of buffers with which a forward pass of DDP's begins."""
    if isinstance(wrapper, nn.parallel.DistributedDataParallel) and wrapper.will_sync_module_buffers():
        if not wrapper._join_config.enable:  # a rank that has no batch any more takes part without a forward pass
            note_collective(DDP_FORWARD, which, wrapper.process_group)


def _are_indices(given: Any) -> bool:
    """Whether these are indices alone, of samples that the module itself may hold."""
    return all(tensor.dim() <= 1 and not tensor.is_floating_point() for tensor in tree_tensors(given))


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
