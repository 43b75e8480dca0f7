"""Optimizer steps with or without averaged gradients; backward passes that bypass the wrapper."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ddpcheck.findings.evidence.steps import LoopEvent
from ddpcheck.findings.source_lines import frames_from, is_of_program, location_of, user_location
from ddpcheck.gather.autograd.autograd_graph import in_backward
from ddpcheck.gather.ddp.ddp_wrapper import optimizer_params, parameters_in_wrappers
from ddpcheck.gather.forward_hooks import OutsideOfCompiledCode, before_forward
from ddpcheck.gather.patching import Recorder
from ddpcheck.gather.state.fingerprints import version_counter
from ddpcheck.gather.steps.gradient_distance import has_gradient
from ddpcheck.record.loop.loop_record import STEP, LoopRecord
from ddpcheck.record.loop.step_tracker import StepTracker
from ddpcheck.record.recording import UnpickledHook, remove_hooks
from ddpcheck.stream.ledger import BYPASSING_EVENTS, Contribution
from ddpcheck.stream.rank_report import is_probed

# Number of optimizer steps on unreduced gradients after which this rank reports without other ranks. Counted here:
# ranks that train independently on purpose (local SGD) would otherwise report in each step.
_FEWEST = 3
_FEWEST_SHARDED = 16  # for shards reduced before: a loop may step more often than it reduces
_STEP_SPARING = LoopEvent("step", spares_unreduced=True)


@dataclass(slots=True)
class _OptimizerEntry:
    num_groups: int = 0  # number of parameter groups at the last check
    has_parameters: bool = False  # True if some parameters belong to the wrapper
    reductions: int = 0  # number of reductions at the last step


@dataclass(eq=False)
class OptimizerSteps(Recorder, subjects=("loop",), inner=("before_step", "after_step")):
    """Recorder of optimizer steps on a wrapper's gradients; finds steps without gradient reduction."""

    _tracker: StepTracker
    _loop: LoopRecord
    _has_others: Callable[[], bool]  # returns True if there are ranks to average with
    # called after several steps on gradients not reduced (with the last contribution of a forward pass of the
    # wrapper, if any), and after a step on gradients of a second backward pass
    _report_unreduced: Callable[[Contribution | None], object]
    _report_replaced: Callable[[], object]  # called if a prepared reduction is missing for several steps
    _locate_bypass: Callable[[], object]  # called after the first step on gradients without a forward pass
    _entries: WeakKeyDictionary[Any, _OptimizerEntry] = field(default_factory=WeakKeyDictionary, init=False)
    _steps_without_reduction = 0  # consecutive steps without a reduction since the optimizer's last step
    _bypassing_steps = 0  # steps on gradients of backward passes that bypass the wrapper
    _last_reductions = 0  # number of reductions at the last step of any optimizer
    _missing_reductions = 0  # consecutive steps whose prepared reduction is missing

    @property
    def has_stepped(self) -> bool:
        """Return True if an optimizer with parameters of the wrapper has stepped."""
        return any(entry.has_parameters for entry in self._entries.values())

    def before_step(self, optimizer: Any, has_closure: bool, inside: bool) -> None:
        if not inside:
            self._tracker.end_pending_step()
            if not has_closure:
                self.record_step(optimizer)

    def after_step(self, optimizer: Any, has_closure: bool) -> None:
        if has_closure and not in_backward():  # the closure has run the last passes
            self.record_step(optimizer)

    def record_step(self, optimizer: Any) -> None:
        """Record an optimizer step; called when all backward passes before the step have ended."""
        last_reductions, self._last_reductions = self._last_reductions, self._tracker.number
        if last_reductions == self._last_reductions and self._loop.ledger.prepared is not None:
            self._count_missing_reduction()
        else:
            self._missing_reductions = 0
        entry = self._entries.get(optimizer)
        if entry is None or entry.num_groups != len(optimizer.param_groups):
            entry = self._entries.setdefault(optimizer, _OptimizerEntry())
            entry.num_groups = len(optimizer.param_groups)
            entry.has_parameters = not {*map(id, optimizer_params(optimizer))}.isdisjoint(
                map(id, self._tracker.parameters.tensors)
            )
        if not entry.has_parameters:
            return
        number, ledger = self._tracker.number, self._loop.ledger
        reductions, entry.reductions = number - entry.reductions, number
        if (reductions and not ledger.has_unreduced) or not self._has_others():  # fast path of a healthy step
            self._steps_without_reduction = 0
            self._loop.add(STEP)
            return
        if self._tracker.parameters.is_sharded:
            self._note_unreduced_shards(no_reduction=not reductions)
        else:
            self._note_unreduced({*map(id, optimizer_params(optimizer))}, no_reduction=not reductions)

    def _count_missing_reduction(self) -> None:
        """Count a reduction that forward prepared but backward did not run.

        Replaced parameters are the likely cause, reported after 3, 6, 12 ... missing reductions.
        """
        self._missing_reductions += 1
        times, remainder = divmod(self._missing_reductions, _FEWEST)
        if not remainder and is_probed(times) and self._has_others():
            self._report_replaced()

    def _note_unreduced(self, param_ids: set[int], *, no_reduction: bool) -> None:
        """Record an optimizer step that may have used gradients that were not reduced.

        `no_reduction`: True if no reduction ran since the optimizer's last step.
        """
        ledger = self._loop.ledger
        prepared, uses = bool(ledger.forwards[True]), ledger.has_unreduced and self._are_unreduced(param_ids)
        used = [entry for entry in ledger.open if not entry.reduced] if uses else []
        if used:
            self._loop.note("step")
        else:
            self._loop.add(_STEP_SPARING if ledger.has_unreduced else STEP)
        bypassing = [entry for entry in used if entry.backward.kind in BYPASSING_EVENTS]
        from_forward = [entry for entry in used if entry.forward is not None]
        unpaired = [entry for entry in used if entry.after is not None]
        if from_forward or unpaired:
            self._tracker.unreduced.clear()
            self._loop.report(self._tracker.number)
        if unpaired:
            self._report_unreduced(unpaired[-1])
            return
        grad_ids = {id(p) for p in self._tracker.parameters.tensors if p.grad is not None}
        times = 0
        if bypassing:
            times = self._bypassing_steps = self._bypassing_steps + 1
        elif not no_reduction or not grad_ids:
            self._steps_without_reduction = 0
        elif grad_ids & param_ids:
            times = self._steps_without_reduction = self._steps_without_reduction + 1
            if prepared:  # the loss does not depend on the returned tensors
                times, self._tracker.hooks_parameters = 0, True
        if times == 1 and not from_forward:
            self._locate_bypass()
        if times == _FEWEST and not grad_ids & parameters_in_wrappers(but=self._tracker.wrapper):  # else wrapped again
            self._report_unreduced(from_forward[-1] if from_forward else None)

    def _note_unreduced_shards(self, *, no_reduction: bool) -> None:
        """Record an optimizer step that may miss gradients of shards that were not reduced.

        Unreduced gradients never reach `.grad` of shards. `no_reduction`: True if no reduction ran since the last step.
        """
        ledger = self._loop.ledger
        pending = [entry for entry in ledger.open if not entry.reduced]
        self._loop.note("step")
        self._steps_without_reduction = self._steps_without_reduction + 1 if pending else 0
        if pending and self._steps_without_reduction == (
            _FEWEST_SHARDED if no_reduction and self._tracker.number else _FEWEST
        ):
            self._report_unreduced(pending[-1])

    def _are_unreduced(self, param_ids: set[int]) -> bool:
        tensors, indices = self._tracker.parameters.tensors, self._tracker.unreduced
        params = [tensors[i] for i in indices if id(tensors[i]) in param_ids]
        return any(map(has_gradient, params if indices else [*tensors[:1], *tensors[-1:]]))


DDP_FILE = inspect.getfile(nn.parallel.DistributedDataParallel)

_GradientMarks = list[tuple[int, int] | None]


class BypassRecorder(Recorder, subjects=("loop",)):
    """Recorder of backward passes that bypass DDP's forward, so that gradients are not reduced."""

    def __init__(
        self, module: nn.Module, parameters: Sequence[torch.Tensor], sink: Callable[[LoopEvent], object]
    ) -> None:
        self.event = LoopEvent("forward inside")  # call that causes the bypass, with the line once known
        self._sink = sink  # receives an event for each bypass
        self._module = module
        self._sampled_params = [*parameters[:1], *parameters[-1:]]  # first and last: `.grad` shows a backward pass
        self._marks: _GradientMarks = []
        self.reductions = 0  # number of finished reductions at the start of the running backward pass
        self._in_forward = False
        self._may_hook = True
        self._handles: list[Any] = []

    def backward_begins(self, reductions: int, *, in_forward: bool) -> None:
        """Keep version counters of two sampled `.grad`, to detect changes by backward."""
        self._in_forward = in_forward
        self._marks, self.reductions = self._read_marks(), reductions

    def backward_ended(self) -> None:
        """Report a bypass if backward changed a sampled `.grad` without a reduction."""
        marks, last_marks = self._read_marks(), self._marks
        if any(mark is not None and mark != previous for mark, previous in zip(marks, last_marks, strict=False)):
            if self._in_forward:
                self.event = LoopEvent("backward inside", location=str(user_location() or ""))
            else:
                self.locate_bypass()
            self._sink(self.event)

    def close(self) -> None:
        self._may_hook = False
        remove_hooks(self._handles)

    def _read_marks(self) -> _GradientMarks:
        marks: _GradientMarks = []
        for parameter in self._sampled_params:
            gradient = parameter.grad
            marks.append(None if gradient is None else (id(gradient), version_counter(gradient)))
        return marks

    def locate_bypass(self) -> None:
        """Hook the inner module and submodules, to find the line that calls them directly."""
        if self._may_hook and not self._handles and not self.event.location:
            hook = OutsideOfCompiledCode(UnpickledHook(self._note_call))
            self._handles = [before_forward(part, hook) for part in self._module.modules()]

    def _note_call(self, *_arguments: Any) -> None:
        if self.event.location or not torch.is_grad_enabled():
            return
        parts = set(self._module.modules())
        frames = [*frames_from(sys._getframe(1))]
        if any(frame.f_code.co_filename == DDP_FILE for frame in frames):
            return
        user_frames = (frame for frame in frames if is_of_program(frame.f_code.co_filename))
        caller = next((frame for frame in user_frames if not _is_method_of(frame, parts)), None)
        if caller is not None:
            self.event = LoopEvent("forward inside", location=str(location_of(caller)))


def _is_method_of(frame: FrameType, parts: set[nn.Module]) -> bool:
    code = frame.f_code
    instance = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return isinstance(instance, nn.Module) and instance in parts
