"""Optimizer steps around a wrapper: whether each uses gradients that DDP has averaged."""

from __future__ import annotations

import itertools
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddpcheck.gather.autograd.autograd_graph import in_backward
from ddpcheck.gather.ddp.ddp_wrapper import parameters_in_wrappers
from ddpcheck.monitor.loop_record import STEP, LoopRecord
from ddpcheck.monitor.module_hooks import UnpickledHook, remove_hooks
from ddpcheck.monitor.step_tracker import StepTracker

_UNAVERAGED_STEPS = 3  # optimizer steps on gradients that have not been averaged, before that is reported


# One hook for all, which stays where objects are only dropped: torch goes through its hooks as it calls them, and must
# not meet one that the garbage collector takes off meanwhile.
_handles: list[Any] = []
_living: WeakValueDictionary[int, OptimizerSteps] = WeakValueDictionary()  # in the order in which they were made
_numbers = itertools.count()


def _before_steps(optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    for steps in list(_living.values()):
        steps.before_step(optimizer, arguments, named)


def _after_steps(optimizer: Any, *_arguments: Any) -> None:
    for steps in list(_living.values()):
        steps.after_step(optimizer)


class Unaveraged(Protocol):
    """What is told of optimizer steps on gradients that were not averaged."""

    @property
    def has_others(self) -> bool:
        """Whether there are other ranks to average with."""

    def unaveraged(self, *, under_no_sync: bool) -> None:
        """Several steps, one after the other, were so; `under_no_sync`: the wrapper's forward ran in the last."""


class OptimizerSteps:
    """Follows every optimizer that has parameters of one wrapper."""

    def __init__(self, tracker: StepTracker, loop: LoopRecord, recorder: Unaveraged) -> None:
        """Follow the steps of `tracker`, note those of optimizers in `loop`, and tell `recorder`."""
        self._tracker = tracker
        self._loop = loop
        self._recorder = recorder
        self._reductions: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # at the last step of each optimizer
        self._unaveraged_steps = 0
        self._number = next(_numbers)

    def attach(self) -> None:
        """Follow every optimizer of this process, as long as this object lives."""
        _living[self._number] = self
        if not _handles:
            before, after = UnpickledHook(_before_steps), UnpickledHook(_after_steps)
            _handles[:] = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def detach(self) -> None:
        """Follow them no more."""
        _living.pop(self._number, None)
        if not _living:
            remove_hooks(_handles)

    def before_step(self, optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """An optimizer is about to step, on gradients that DDP has averaged or not."""
        if in_backward():  # on one parameter, say, by a hook that DDP calls when it has averaged that
            return
        self._tracker.settle()
        number = self._tracker.number
        reductions = number - self._reductions.get(optimizer, 0)
        self._reductions[optimizer] = number
        (no_sync_forwards, forwards), self._loop.forwards = self._loop.forwards, [0, 0]
        if self._tracker.unreduced and not any(map(callable, (*arguments[1:], *named.values()))):
            self._judge_unreduced(optimizer)
        if reductions or not self._recorder.has_others:  # the healthy step, at no cost for each parameter
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
                if not parameters & parameters_in_wrappers(but=self._tracker.wrapper):  # wrapped again
                    self._recorder.unaveraged(under_no_sync=bool(no_sync_forwards))

    def after_step(self, optimizer: Any) -> None:
        """An optimizer has stepped; a closure that it was given has run the last passes of the step."""
        if self._tracker.unreduced and not in_backward():
            self._judge_unreduced(optimizer)

    def _judge_unreduced(self, optimizer: Any) -> None:
        """Report a step that uses gradients of backward passes after the last reduction."""
        tensors, in_optimizer = self._tracker.parameters.tensors, _parameters_of(optimizer)
        unreduced = [tensors[index] for index in self._tracker.unreduced]
        used = [p for p in unreduced if id(p) in in_optimizer and p.grad is not None]
        if not self._recorder.has_others or not any(bool(p.grad.detach().count_nonzero()) for p in used):
            return
        self._tracker.unreduced.clear()
        self._loop.note("step")
        self._loop.report(self._tracker.number)


def _parameters_of(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
