"""Optimizer steps around a wrapper: whether each uses gradients that DDP has averaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import call
from typing import Any
from weakref import WeakKeyDictionary

from ddpcheck.findings.evidence.steps import LoopEvent
from ddpcheck.gather.autograd.autograd_graph import in_backward
from ddpcheck.gather.ddp.ddp_wrapper import parameters_in_wrappers
from ddpcheck.gather.ddp.optimizer_options import parameters_of
from ddpcheck.gather.patching import Recorder
from ddpcheck.gather.steps.gradient_distance import has_gradient
from ddpcheck.record.loop.loop_record import STEP, LoopRecord
from ddpcheck.record.loop.step_hooks import follow_steps, unfollow_steps
from ddpcheck.record.loop.step_tracker import StepTracker
from ddpcheck.record.module_hooks import Living
from ddpcheck.stream.ledger import AROUND, Contribution
from ddpcheck.stream.rank_report import is_probed

_FEWEST = 3  # optimizer steps on gradients that have not been averaged, before that is told without the other ranks
_MANY = 16  # likewise, of shards that have been reduced before: a loop may step more often than it reduces
_SPARING = LoopEvent("step", spares_unreduced=True)


class _Living:
    """Those that follow steps, as long as they live."""

    def __init__(self) -> None:
        self.all: Living[OptimizerSteps] = Living()

    def before_step(self, optimizer: Any, has_closure: bool, inside: bool) -> None:
        """An optimizer is about to step, on gradients that DDP has averaged or not."""
        for steps in () if inside else filter(None, map(call, self.all.refs)):  # each call costs in a step
            steps.settle()
            if not has_closure:
                steps.passes_ended(optimizer)

    def after_step(self, optimizer: Any, has_closure: bool) -> None:
        """An optimizer has stepped; a closure that it was given has run the last passes of the step."""
        if has_closure and not in_backward():
            for steps in self.all:
                steps.passes_ended(optimizer)


_living = _Living()


@dataclass(slots=True)
class _Followed:
    groups: int = 0  # of the optimizer, when it was asked for its parameters
    holds: bool = False  # some of the wrapper's
    reductions: int = 0  # at its last step


class OptimizerSteps(Recorder, subjects=("loop",), inner=("__init__",)):
    """Follows every optimizer that has parameters of one wrapper.

    Attributes:
        settle: Has the tracker of the steps know that an optimizer steps.
    """

    def __init__(
        self,
        tracker: StepTracker,
        loop: LoopRecord,
        has_others: Callable[[], bool],
        tell: Callable[[Contribution | None], object],
        look: Callable[[], object],
        listen: Callable[[], object],
    ) -> None:
        """Note the steps of optimizers in `loop`, beside those of `tracker`.

        `has_others` says whether there are ranks to average with. `tell` is called where several steps used gradients
        that were not averaged, with those of the last step that belong to a forward pass of the wrapper; or where one
        has used what a second backward pass through it has added. `look` is
        called where nothing was reduced for several steps, although DDP has prepared for it; `listen` after the first
        step on gradients that no forward pass of the wrapper accounts for.
        """
        self._tracker = tracker
        self.settle = tracker.settle
        self._loop = loop
        self._has_others = has_others
        self._tell = tell
        self._look = look
        self._listen = listen
        self._known: WeakKeyDictionary[Any, _Followed] = WeakKeyDictionary()
        self._alone = 0  # steps, one after the other, since whose optimizer's last one nothing was reduced
        self._around = 0  # steps on gradients of backward passes around the wrapper
        self._last = 0  # the number of reductions at the last step of any optimizer
        self._unanswered = 0  # steps, one after the other, at which a prepared reduction had not come

    @property
    def follows(self) -> bool:
        """Whether an optimizer has stepped that holds parameters of the wrapper."""
        return any(known.holds for known in self._known.values())

    def attach(self) -> None:
        """Follow every optimizer of this process, as long as this object lives."""
        _living.all.add(self)
        follow_steps(_living)

    def detach(self) -> None:
        _living.all.discard(self)
        if not _living.all:
            unfollow_steps(_living)

    def passes_ended(self, optimizer: Any) -> None:
        """All passes before the step of an optimizer have run."""
        last, self._last = self._last, self._tracker.number
        if last == self._last and self._loop.ledger.prepared is not None:
            self._note_unanswered()
        else:
            self._unanswered = 0
        known = self._known.get(optimizer)
        if known is None or known.groups != len(optimizer.param_groups):
            known = self._known.setdefault(optimizer, _Followed())
            known.groups = len(optimizer.param_groups)
            known.holds = not {*map(id, parameters_of(optimizer))}.isdisjoint(map(id, self._tracker.parameters.tensors))
        if not known.holds:
            return
        number, ledger = self._tracker.number, self._loop.ledger
        reductions, known.reductions = number - known.reductions, number
        if (reductions and not ledger.unreduced) or not self._has_others():  # the healthy step, at no cost for
            self._alone = 0  # each parameter
            self._loop.add(STEP)
            return
        if self._tracker.parameters.is_sharded:
            self._step_without_gradients(alone=not reductions)
        else:
            self._step_unreduced({*map(id, parameters_of(optimizer))}, alone=not reductions)

    def _note_unanswered(self) -> None:
        """Have parameters looked at after 3, 6, 12 ... steps: DDP may wait for tensors that nobody uses."""
        self._unanswered += 1
        times, rest = divmod(self._unanswered, _FEWEST)
        if not rest and is_probed(times) and self._has_others():
            self._look()

    def _step_unreduced(self, held: set[int], *, alone: bool) -> None:
        """A step for which nothing was reduced (`alone`), or before which other gradients have come."""
        ledger = self._loop.ledger
        prepared, uses = bool(ledger.forwards[True]), ledger.unreduced and self._is_there(held)
        used = [one for one in ledger.open if not one.reduced] if uses else []
        if used:
            self._loop.note("step")
        else:
            self._loop.add(_SPARING if ledger.unreduced else STEP)
        around = [one for one in used if one.backward.kind in AROUND]
        own = [one for one in used if one.forward is not None]
        unpaired = [one for one in used if one.after is not None]
        if own or unpaired:
            self._tracker.unreduced.clear()
            self._loop.report(self._tracker.number)
        if unpaired:
            self._tell(unpaired[-1])
            return
        there = {id(p) for p in self._tracker.parameters.tensors if p.grad is not None}
        times = 0
        if around:
            times = self._around = self._around + 1
        elif not alone or not there:
            self._alone = 0
        elif there & held:
            times = self._alone = self._alone + 1
            if prepared:  # the loss does not come through the tensors that they have returned
                times, self._tracker.hooks_parameters = 0, True
        if times == 1 and not own:
            self._listen()
        if times == _FEWEST and not there & parameters_in_wrappers(but=self._tracker.wrapper):  # wrapped again
            self._tell(own[-1] if own else None)

    def _step_without_gradients(self, *, alone: bool) -> None:
        """A step on shards for which nothing was reduced (`alone`), or not what has come after the reduction.

        What is not reduced is none of their gradients.
        """
        ledger = self._loop.ledger
        waits = [one for one in ledger.open if not one.reduced]
        self._loop.note("step")
        self._alone = self._alone + 1 if waits else 0
        if waits and self._alone == (_MANY if alone and self._tracker.number else _FEWEST):
            self._tell(waits[-1])

    def _is_there(self, held: set[int]) -> bool:
        """Whether an optimizer of these parameters is about to use what was not reduced: it was not zeroed."""
        tensors, indices = self._tracker.parameters.tensors, self._tracker.unreduced
        some = [tensors[i] for i in indices if id(tensors[i]) in held] if indices else [*tensors[:1], *tensors[-1:]]
        return any(map(has_gradient, some))
