"""Optimizer steps around a wrapper: whether each uses gradients that DDP has averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary, finalize

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddpcheck.findings.report import Finding
from ddpcheck.gather.ddp.ddp_wrapper import parameters_in_wrappers
from ddpcheck.monitor.alarms import AlarmBoard
from ddpcheck.monitor.judging import WatchContext, judge_unaveraged_steps
from ddpcheck.monitor.loop_record import STEP, LoopRecord
from ddpcheck.monitor.module_hooks import UnpickledHook, remove_hooks
from ddpcheck.monitor.step_tracker import StepTracker

_UNAVERAGED_STEPS = 3  # optimizer steps on gradients that have not been averaged, before that is reported


class OptimizerSteps:
    """Follows every optimizer that has parameters of one wrapper."""

    def __init__(
        self,
        tracker: StepTracker,
        context: WatchContext,
        alarms: AlarmBoard,
        loop: LoopRecord,
        report: Callable[[Iterable[Finding]], None],
    ) -> None:
        self._tracker = tracker
        self._context = context
        self._alarms = alarms
        self._loop = loop
        self._report = report
        self._reductions: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # at the last step of each optimizer
        self._unaveraged_steps = 0
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Hang the hooks on every optimizer of this process, as long as this object lives."""
        before, after = UnpickledHook.weakly(self._before_step), UnpickledHook.weakly(self._after_step)
        self._handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        for handle in self._handles:
            finalize(self, handle.remove).atexit = False

    def detach(self) -> None:
        """Take the hooks off."""
        remove_hooks(self._handles)

    def _before_step(self, optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """An optimizer is about to step, on gradients that DDP has averaged or not."""
        self._tracker.settle()
        number = self._tracker.number
        reductions = number - self._reductions.get(optimizer, 0)
        self._reductions[optimizer] = number
        (no_sync_forwards, forwards), self._loop.forwards = self._loop.forwards, [0, 0]
        if self._tracker.unreduced and not any(map(callable, (*arguments[1:], *named.values()))):
            self._judge_unreduced(optimizer)
        if reductions or not self._alarms.has_others:  # the healthy step, at no cost for each parameter
            self._unaveraged_steps = 0
            self._loop.add(STEP)
            return
        parameters = {id(parameter) for parameter in self._tracker.parameters.tensors if parameter.grad is not None}
        if not parameters:
            self._unaveraged_steps = 0
        elif parameters & _parameters_of(optimizer):
            self._unaveraged_steps += 1
            if forwards:  # the loss does not come through the tensors that they have returned
                self._tracker.hooks_parameters = True
            elif self._unaveraged_steps == _UNAVERAGED_STEPS:
                rank = self._alarms.rank
                if not parameters & parameters_in_wrappers(but=self._tracker.wrapper):  # wrapped again
                    self._report(judge_unaveraged_steps(self._context, rank, number, forwards=no_sync_forwards))

    def _after_step(self, optimizer: Any, *_arguments: Any) -> None:
        """An optimizer has stepped; a closure that it was given has run the last passes of the step."""
        if self._tracker.unreduced:
            self._judge_unreduced(optimizer)

    def _judge_unreduced(self, optimizer: Any) -> None:
        """Report a step that uses gradients of backward passes after the last reduction."""
        tensors, in_optimizer = self._tracker.parameters.tensors, _parameters_of(optimizer)
        unreduced = [tensors[index] for index in self._tracker.unreduced]
        used = [p for p in unreduced if id(p) in in_optimizer and p.grad is not None]
        if not self._alarms.has_others or not any(bool(p.grad.detach().count_nonzero()) for p in used):
            return
        self._tracker.unreduced.clear()
        self._loop.note("step")
        self._loop.report(self._tracker.number)


def _parameters_of(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
