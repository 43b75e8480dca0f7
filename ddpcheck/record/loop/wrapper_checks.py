"""Recorders of one wrapper: ranks that train independently, ignored assignments, pace, and collectives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.evidence.loop import MAX_PACE_RUNS, ModuleChanged, PaceRun
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import is_user_file, lines_of_program, location_of, user_frame, user_location
from ddpcheck.gather.collectives.collective_log import log_ddp_collective
from ddpcheck.gather.collectives.groups import Group, named_group
from ddpcheck.gather.ddp.ddp_wrapper import comm_hook_of
from ddpcheck.gather.patching import Patch, Recorder, guarded
from ddpcheck.gather.state.fingerprints import fingerprint, fingerprints, is_dtensor, local_part
from ddpcheck.record.loop.loop_record import StepListener
from ddpcheck.record.loop.step_recorder import StepRecorder
from ddpcheck.record.recording import Followers, Recording
from ddpcheck.record.source.source_scope import skipping_lines
from ddpcheck.stream.entries import DDP_BACKWARD, DDP_FORWARD, SHARD_FORWARD, LocalSgdEnd, place_of_backward
from ddpcheck.stream.rank_log import RankLog

_MAX_FINGERPRINTS = 4096  # of a parameter, while ranks train independently


class LocalSgdTracker(StepListener, Recorder, subjects=("replicas",)):
    """Recorder of fingerprints of the smallest parameter, while ranks train independently (local SGD)."""

    def __init__(self, recorder: Callable[[], StepRecorder], number: int = 0, *, under_no_sync: bool = False) -> None:
        self._recorder = recorder
        self._number = number
        self._under_no_sync = under_no_sync  # True to record while steps use `no_sync`, too
        self._fingerprints: list[int] = []
        self._first_step, self._hook = 0, ""

    def forward_begins(self) -> None:
        recorder = self._recorder()
        trains_locally = recorder.may_diverge or (self._under_no_sync and recorder.steps_on_local_grads)
        if trains_locally and not recorder.uses_join and len(self._fingerprints) < _MAX_FINGERPRINTS:
            if not self._fingerprints and (wrapper := recorder.wrapper) is not None:
                self._first_step, self._hook = recorder.step, comm_hook_of(wrapper)
            self._add_fingerprint(recorder)

    def final_entry(self) -> LocalSgdEnd | None:
        """Return the log entry with recorded and final fingerprints; None if nothing was recorded."""
        if not self._fingerprints:
            return None
        recorder = self._recorder()
        self._add_fingerprint(recorder)
        values = fingerprints(recorder.module.named_parameters())
        return LocalSgdEnd(self._number, self._first_step, tuple(self._fingerprints), values, self._hook)

    def _add_fingerprint(self, recorder: StepRecorder) -> None:
        current = fingerprint(min(recorder.parameters.values(), key=torch.Tensor.numel))
        if self._fingerprints[-1:] != [current]:
            self._fingerprints.append(current)


_CALLER = 3  # frames from the recording function to the assigning line


class IgnoredData(StepListener, Recorder, subjects=("parameters",)):
    """Recorder of assignments to a shard's `.data` without effect; forward passes call `sink`."""

    def __init__(self, recorder: Callable[[], StepRecorder], sink: Callable[[Sequence[ModuleChanged]], object]) -> None:
        self._recorder = recorder
        self._sink = sink
        self._ignored: dict[Location, list[str]] = {}

    def begin(self) -> None:
        """Start recording; requires that `DTensor` is imported."""
        _ignored_data_recorders.add(self)

    def close(self) -> None:
        _ignored_data_recorders.discard(self)

    def note(self, shard: torch.Tensor, where: Location) -> None:
        """Record an assignment to `.data` of a shard."""
        name = next((name for name, param in self._recorder().parameters.items() if param is shard), None)
        if name is not None and name not in (names := self._ignored.setdefault(where, [])):
            names.append(name)

    def forward_begins(self) -> None:
        entries, self._ignored = self._ignored, {}
        if entries:
            self._sink([ModuleChanged(0, "ignored", ".data =", (*names,), line) for line, names in entries.items()])


def is_ignored(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    """Return True if a shard ignored the value assigned to its `.data`."""
    part = local_part(parameter) if is_dtensor(parameter) else None
    return part is not None and part.numel() > 0 and part.data_ptr() != local_part(value).data_ptr()


def _recording_property(original: Any) -> Any:
    note = guarded(_note_assignment)

    def set_data(shard: Any, value: Any) -> None:
        original.__set__(shard, value)
        note(shard, value)

    return property(lambda shard: original.__get__(shard), set_data)


def _note_assignment(shard: torch.Tensor, value: torch.Tensor) -> None:
    caller = sys._getframe(_CALLER)
    if is_user_file(caller.f_code.co_filename) and is_ignored(shard, value):
        for recorder in _ignored_data_recorders:
            recorder.note(shard, location_of(caller))


_ignored_data_recorders = Followers(
    lambda: [Patch(vars(sys.modules["torch.distributed.tensor"])["DTensor"], "data", _recording_property).undo]
)


class PaceRecorder(Recorder, subjects=("loop",)):
    """Recorder of how many forward passes and batches one wrapper takes per reduction."""

    def __init__(self, run: Recording, number: int) -> None:
        self._run = run
        self._number = number
        self.forwards = 0  # forward passes in training mode since the last reduction
        self.lines: tuple[str, ...] = ()  # stack of the first such forward pass, program lines only
        self._last_batches: dict[int, int] = {}  # batches until the last reduction, by loader
        self._last_loader = -1  # loader at the last reduction
        self._num_runs = 0
        self._pace = (-1, -1)

    def reduced(self, step: int) -> None:
        pace, self.forwards = (self.forwards, self._batches()), 0
        self._last_loader, self._last_batches = self._run.position[0], dict(self._run.batches)
        if pace != self._pace and self._num_runs < MAX_PACE_RUNS:
            after_forward = self.lines if pace[0] != self._pace[0] else ()
            lines = skipping_lines(lines_of_program(sys._getframe(1)), after_forward)
            location = lines[0] if len(lines) == 1 else user_location()  # line that may skip the backward pass
            self._pace, self._num_runs = pace, self._num_runs + 1
            self._run.add(PaceRun(self._number, step, *pace, location))

    def ended(self, step: int) -> None:
        """Record forward passes and batches after the last reduction, when the script ends."""
        pace = self.forwards, self._batches()
        if any(pace) and self._run.position[0] == self._last_loader and 0 < self._num_runs < MAX_PACE_RUNS:
            self._run.add(PaceRun(self._number, step, *pace, None))

    def _batches(self) -> int:
        loader = self._run.position[0]
        return self._run.batches[loader] - self._last_batches.get(loader, 0)


WITH_BUCKETS = "with the order of buckets"  # DDP forward pass that also exchanges the bucket order
_MOST_CALLING_LINES = 256  # cached per wrapper


class _CallingLine:
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
        self._label = which  # name of the wrapper in the log if its process group has several
        # by code and line of the innermost program frame
        self._lines_by_code: dict[tuple[CodeType, int] | None, _CallingLine] = {}
        self._by_location: dict[Location | None, _CallingLine] = {}  # several functions may share a location
        self._line = _CallingLine(None)
        # process group of the last reduction; weak, since a reference keeps the group's threads alive
        self._group: tuple[ref[Any], Group] | None = None
        self._num_unsynced = 0  # forward passes under no_sync
        self._has_reduced = False

    def forward_returned(self, *, synced: bool) -> None:
        frame = user_frame(sys._getframe(1))
        key = None if frame is None else (frame.f_code, frame.f_lineno)
        line = self._lines_by_code.get(key)
        if line is None:
            location = user_location(frame) if frame is not None else None
            if len(self._lines_by_code) >= _MOST_CALLING_LINES:  # code objects may be created anew in each step
                self._lines_by_code.clear()
            line = self._lines_by_code[key] = self._by_location.setdefault(location, _CallingLine(location))
        self.forwards += 1
        line.forwards += 1
        self._line = line
        self._log.count_forward(self._number, line.number, line.forwards)
        self._num_unsynced += not synced

    @property
    def code(self) -> CodeType | None:
        """Return the code object of the function that last called forward with gradients."""
        return next((key[0] for key, line in self._lines_by_code.items() if key and line is self._line), None)

    @property
    def line(self) -> Location | None:
        return self._line.location

    def note_broadcast(self, wrapper: nn.Module) -> None:
        """Record the buffer broadcast of a DDP forward pass, if DDP does one."""
        if isinstance(wrapper, nn.parallel.DistributedDataParallel) and wrapper.will_sync_module_buffers():
            if not wrapper._join_config.enable:  # under Join, a rank without a batch takes part without a forward pass
                labels = [self._label] * bool(self._label) + [WITH_BUCKETS] * self._exchanges_bucket_order(wrapper)
                log_ddp_collective(DDP_FORWARD, ", ".join(labels), wrapper.process_group)

    def _exchanges_bucket_order(self, wrapper: nn.parallel.DistributedDataParallel) -> bool:
        """Return True in the first forward after backward, if DDP broadcasts the bucket order."""
        searches = wrapper.find_unused_parameters and not wrapper.static_graph
        rebuilt = getattr(wrapper, "_has_rebuilt_buckets", True)
        return self._has_reduced and torch.is_grad_enabled() and not (rebuilt or searches)

    def note_gather(self, group: dist.ProcessGroup | None) -> None:
        location = user_location()
        line = self._by_location.get(location, _CallingLine(location))
        backward_place = ""
        if torch.is_grad_enabled():
            backward_place = place_of_backward(line.forwards + 1, line.text, self._num_unsynced, self._log.batch)
        log_ddp_collective(SHARD_FORWARD, self._label, group, call_place=backward_place)

    def note_reduction(self, wrapper: nn.Module) -> None:
        """Record a DDP reduction, which runs in C++; collectives of FSDP2 are recorded elsewhere."""
        if not isinstance(wrapper, nn.parallel.DistributedDataParallel) or wrapper._join_config.enable:
            return
        self._has_reduced = True
        group = wrapper.process_group
        if self._group is None or self._group[0]() is not group:
            self._group = ref(group), named_group(group)
        backward_place = place_of_backward(self._line.forwards, self._line.text, self._num_unsynced, self._log.batch)
        log_ddp_collective(DDP_BACKWARD, self._label, known=self._group[1], call_place=backward_place)
