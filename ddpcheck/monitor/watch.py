"""`watch`: attaches to a wrapper, follows its rounds, and has the ranks meet where one has something to tell."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.evidence.steps import LoopEvent
from ddpcheck.findings.report import Finding, Report
from ddpcheck.findings.source_lines import exception_location, making_of, user_location
from ddpcheck.findings.wording import Names
from ddpcheck.gather.autograd.autograd_graph import all_names
from ddpcheck.gather.ddp.ddp_wrapper import broadcasts_buffers, facts_of, living_wrappers
from ddpcheck.gather.state.module_description import digest_of, fingerprints
from ddpcheck.gather.steps.training_step import visible_tensors
from ddpcheck.monitor import no_sync
from ddpcheck.monitor.alarms import AlarmBoard
from ddpcheck.monitor.judging import Watched, judge_accounts, judge_alone, judge_events, judge_stock
from ddpcheck.monitor.micro_batches import MicroBatches
from ddpcheck.monitor.module_hooks import around_each_step, hold, let_go
from ddpcheck.monitor.parameter_history import ParameterHistory
from ddpcheck.monitor.rank_report import RankReport, is_look
from ddpcheck.monitor.reporting import FindingReporter, OnFinding, check_numbers, checked_choice
from ddpcheck.monitor.step_probe import StepProbe, capture_replica_state, differences_from_average
from ddpcheck.monitor.step_tracker import StepTracker

_SETTLED = (8, 128)  # rounds after which what find_unused_parameters and static_graph allow for is judged
_PACED = 16  # the round after which the ranks agree on how often they ask each other
_FAREWELL = 10.0  # seconds that ranks wait for each other when the watch closes
_EVENTS_KEPT = 64
_FORWARD, _BACKWARD = LoopEvent("forward", synchronises=True), LoopEvent("backward")
_UNSYNCHRONISED, _STEP = LoopEvent("forward"), LoopEvent("step")
_STEPS_ALONE = 3  # steps on gradients that nobody has averaged before that is told


def watch(
    wrapper: nn.Module,
    *,
    detect_anomalous_params: bool = True,
    check_consistency_every: int = 0,
    check_parity_every: int = 0,
    check_normalisation: bool = True,
    on_finding: OnFinding = "raise",
    ignore: Sequence[str] = (),
    timeout: float = 60.0,
) -> Watch:
    """Watch a training loop under `DistributedDataParallel` until `close`; every rank of its group has to.

    It lives as long as the module in the wrapper, whoever holds what this returns: also where the wrapper is dropped
    and training goes on, which is told (DDP501).

    Args:
        wrapper: The `DistributedDataParallel`, or a module that holds one (a compiled one, say) or is in one.
        detect_anomalous_params: Find parameters that do not take part in the loss as DDP expects (DDP101 to DDP108),
            before a rank hangs on one. A step that misses a parameter goes on with a gradient of zeros for it, as
            under `find_unused_parameters`.
        check_consistency_every: Compare modules, parameters, buffers and gradients of the ranks every so many
            synchronised backward passes (DDP2xx, 301, 306); 0 for never.
        check_parity_every: Every so many, average the ranks' own gradients once more by an all-reduce of ddpcheck's,
            and compare the result with what the reducer has left in `.grad` (DDP302, 303); 0 for never.
        check_normalisation: Measure, in optimizer steps 0, 1, 2, 4, 8 ..., what weight the cross entropy of each target
            (token, say) has in the step, and find means of means over unequal micro-batches or ranks (DDP514, 305).
        on_finding: "raise" raises `FindingsError` for errors, on all ranks in the same backward pass, and warns of the
            rest; "warn" warns of both, on the first rank of the group; a function is called with each `Finding` on
            every rank. Each cause is told once.
        ignore: Rules that are not told of, by code, prefix of a code or name: what is so on purpose.
        timeout: Seconds to wait for the other ranks where they meet.

    Returns:
        The watch, which is a context manager.

    Raises:
        UsageError: There is no DDP in `wrapper`, or an argument is none of its choices.
    """
    return Watch(
        wrapper,
        detect_anomalous_params=detect_anomalous_params,
        check_consistency_every=check_consistency_every,
        check_parity_every=check_parity_every,
        check_normalisation=check_normalisation,
        on_finding=on_finding,
        ignore=ignore,
        timeout=timeout,
    )


def find_wrapper(module: nn.Module) -> nn.parallel.DistributedDataParallel:
    """The one `DistributedDataParallel` that `module` is or holds, or that has been made around it.

    Raises:
        UsageError: There is none, or there are several.
    """
    ddp = nn.parallel.DistributedDataParallel
    found = [part for part in module.modules() if isinstance(part, ddp)] if isinstance(module, nn.Module) else []
    if not found:
        found = [wrapper for wrapper in living_wrappers() if vars(wrapper)["_modules"].get("module") is module]
    if len(found) != 1:
        many = f"{len(found)} of them" if found else "none"
        raise UsageError(
            "watch needs a DistributedDataParallel, or a module that holds one or is in one; there is "
            f"{many} for {type(module).__name__}"
        )
    return found[0]


class Watch:
    """What `watch` returns; attached until `close`.

    Attributes:
        findings: All that has been found so far, the same on every rank.
        step: The number of synchronised backward passes that have ended.
    """

    def __init__(
        self,
        wrapper: nn.Module,
        *,
        detect_anomalous_params: bool = True,
        check_consistency_every: int = 0,
        check_parity_every: int = 0,
        check_normalisation: bool = True,
        on_finding: OnFinding = "raise",
        ignore: Sequence[str] = (),
        timeout: float = 60.0,
        already_told: Sequence[Finding] = (),
        began_alike: bool = False,
    ) -> None:
        everies = {"check_consistency_every": check_consistency_every, "check_parity_every": check_parity_every}
        check_numbers(timeout=timeout, ignore=ignore, **everies)
        wrapper = find_wrapper(wrapper)
        self._wrapper = ref(wrapper)
        self._module: nn.Module = wrapper.module
        self._detects = detect_anomalous_params
        self._consistency_every = check_consistency_every
        self._parity_every = check_parity_every
        self._alarms = AlarmBoard(wrapper.process_group, timeout)
        speaks = self._alarms.rank == self._alarms.ranks[0]
        self._reporter = FindingReporter(checked_choice(on_finding), speaks=speaks, locate=self._locate, ignore=ignore)
        self._reporter.take_as_told(already_told)
        self._tracker = StepTracker(wrapper, self)
        self._parameters = dict(zip(self._tracker.names, self._tracker.parameters, strict=True))
        self._watched = replace(self._describe(wrapper), began_alike=began_alike)
        self._look: StepProbe | None = None
        self._micro_batches = MicroBatches(self._tracker.parameters) if check_normalisation else None
        self._ledger = ParameterHistory(self._module, self._parameters, self._watched.wrapper)
        self._events: list[LoopEvent] = []  # of this round
        self._last_round: list[LoopEvent] = []
        self._rounds_at_step: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._unsynchronised = self._steps_alone = self._forwards = 0
        self._step_handles = around_each_step(self._before_step, self._after_step)
        self._strange: tuple[LoopEvent, ...] = ()
        self._comparisons = 0
        self._attached = True
        self._thawed = False
        self._began = time.monotonic()
        knows_start = began_alike and check_consistency_every
        self._constructed = fingerprints(self._module.named_parameters()) if knows_start else {}
        self._at_first_forward: dict[str, int] = {}
        self._tracker.attach()
        _at_exit.add(self)
        no_sync.listen(wrapper, self._note)
        hold(self._module, self)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failing=error is not None)

    def close(self, *, failing: bool = False) -> None:
        """Leave the wrapper as it was; may be called again.

        What this rank alone knows by then, of the last steps, is told as far as it can tell: the others are not asked.

        Args:
            failing: Whether the loop has ended in an exception of its own, which is what counts; nothing is told then.

        Raises:
            FindingsError: There is an error among that, and errors are to be raised.
        """
        was_attached, self._attached = self._attached, False
        self._detach()
        if not was_attached:
            return
        if failing:
            self._leave(sys.exc_info()[1])
            return
        try:
            self._tell_the_rest()
        finally:
            self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        """Say that this rank comes to no comparison any more, for others that wait at the next one."""
        why = "has closed its watch"
        if error is not None:
            where = exception_location(error)
            why = f"has stopped with {type(error).__name__}{f' at {where}' if where else ''}"
        self._alarms.leave((f"digest/{self._comparisons}", f"account/{self.step}", "close"), why)

    def _tell_the_rest(self) -> None:
        if self._watched.wrapper.tolerates_unused and self._detects and 2 < self.step <= _SETTLED[0]:
            # What never took part is judged after more steps than there have been; the ranks meet once more for it.
            mine = self._ledger.account(self._alarms.rank, self.step - 1, None, None, settled=True)
            accounts = self._alarms.gather("close", mine, at_most=_FAREWELL)
            self._ledger.hear(accounts)
            self._reporter.tell(judge_accounts(accounts, self._watched, settled=True))
        elif self._ledger.unheard or self._strange:
            account = self._ledger.account(self._alarms.rank, self.step, None, None, settled=False)
            account = replace(account, events=self._strange)
            self._ledger.hear([account])
            self._reporter.tell(judge_accounts([account], self._watched, settled=False))

    def _detach(self) -> None:
        self._tracker.detach()
        no_sync.forget(self._wrapper())
        let_go(self._module, self)
        for handle in self._step_handles:
            handle.remove()
        if self._micro_batches is not None:
            self._micro_batches.close()
        if self._look is not None:
            self._look.close()
            self._look = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All that has been found so far."""
        return tuple(self._reporter.findings)

    @property
    def step(self) -> int:
        """The number of synchronised backward passes that have ended."""
        return self._tracker.number

    @property
    def is_of_living_wrapper(self) -> bool:
        """Whether the wrapper is still there; the module that it wrapped may be trained without it."""
        return self._wrapper() is not None

    def report(self) -> Report:
        """The findings so far as a report, for the renderers."""
        world = {"world_size": len(self._alarms.ranks), "steps": self.step}
        findings = tuple(sorted(self.findings, key=Finding.sort_key))
        return Report(type(self._module).__qualname__, world=world, findings=findings)

    def tell(self, findings: Sequence[Finding]) -> None:
        """Tell what an integration has found by itself; the same on every rank.

        Raises:
            FindingsError: There is an error among them, and errors are to be raised.
        """
        self._reporter.tell(findings)

    def replay_inside(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Have a forward pass that is run again, to say why a parameter is missing, run inside of `context()`."""
        self._ledger.around_replay = context

    def expect(self, loss: Any) -> None:
        """Take `loss` for what the forward has returned: for frameworks that call backward inside of it."""
        self._tracker.expect(loss)

    def settle(self) -> None:
        """No further backward pass will come: an optimizer is about to use the gradients.

        It is heard of by itself where a backward pass is over when `Optimizer.step` is called; a framework that runs it
        inside, as a closure, says so.

        Raises:
            FindingsError: An error was found, and errors are to be raised.
        """
        self._tracker.settle()

    def compare(self) -> list[Finding]:
        """Compare modules, parameters and buffers of the ranks now; every rank of the group has to call this.

        Returns:
            What was found, which has also been told.

        Raises:
            FindingsError: There is an error among it, and errors are to be raised.
        """
        found = self._compare(self.step, None, after_backward=False)
        self._reporter.tell(found)
        return found

    # What the rounds tell

    def beginning(self, number: int) -> None:
        """A forward of a round is about to run, and no backward pass has."""
        if self._constructed and not self._at_first_forward:
            self._at_first_forward = fingerprints(self._module.named_parameters())
        keeps = self._is_due(self._parity_every, number)
        if self._look is not None:
            self._look.renew()
        elif (self._detects and self._meets(number)) or keeps:
            self._look = StepProbe(self._module, self._parameters, keeps=keeps)

    def returned(self, number: int, output: Any) -> None:
        """A forward with gradients has returned, in a round or under `no_sync`."""
        if self._micro_batches is not None:
            self._micro_batches.returned(number, output)

    def passed(self, number: int, tensors: Sequence[torch.Tensor], output: Any) -> None:
        """A forward of the round has returned."""
        self._forwards += 1
        self._keep(_FORWARD)
        if self._look is not None:
            self._look.passed(tensors)
        if number == 0 and self._detects and self._watched.wrapper.tolerates_unused:
            visible, opaque = visible_tensors([output])
            if opaque and not visible:  # DDP may well raise in this backward pass, so this cannot wait
                account = RankReport(self._alarms.rank, number, output_type=opaque)
                self._reporter.tell(judge_accounts([account], self._watched, settled=False))

    def unsynchronised(self) -> None:
        """A forward runs after which DDP does not average."""
        self._unsynchronised += 1
        self._keep(_UNSYNCHRONISED)

    def unreduced(self) -> None:
        """The backward pass of such a forward begins."""
        self._keep(_BACKWARD)

    def starting(self, number: int) -> None:
        """A backward pass begins."""
        self._keep(_BACKWARD)
        if self._look is not None:
            self._look.starting()

    def missing(self, number: int, names: Sequence[str]) -> None:
        """Parameters have no part in the round: have all ranks meet, unless that is known."""
        if self._look is not None:
            self._look.stop()
        if self._detects and not self._ledger.is_heard(names):
            self._alarms.post(number)

    def unexpected(self, number: int, names: Sequence[str]) -> None:
        """Under `static_graph`, DDP is about to raise, so this cannot wait for the other ranks."""
        if self._detects:
            account = RankReport(self._alarms.rank, number, absences={0: tuple(names), number: ()})
            self._reporter.tell(judge_accounts([account], self._watched, settled=False))

    def unpaired(self, number: int) -> None:
        """A backward pass has ended that follows no forward of its own, so that DDP has not reduced it."""
        where = user_location()
        self._note("backward", where=str(where) if where else "")
        self._tell_events(number)

    def finished(self, number: int, absent: frozenset[str], lacking: frozenset[str]) -> None:
        """The gradients of a round are averaged."""
        if self._micro_batches is not None:
            self._micro_batches.finished()
        look, self._look = self._look, None
        if look is not None:
            look.close()
        if self._detects:
            self._ledger.enter(number, look, absent, lacking)
            if look is None and not self._thawed and self._alarms.is_asked(number) and self._ledger.has_thawed():
                self._thawed = True
                self._alarms.post(number + 1)
        if any(event.kind == "no_sync" for event in self._events) and judge_events(self._events):
            self._tell_events(number + 1)
        self._last_round, self._events = self._events, []
        findings: list[Finding] = []
        compares = self._is_due(self._parity_every, number) or self._is_due(self._consistency_every, number)
        if compares or self._meets(number) or self._alarms.has_word(number):
            findings += self._meet(number, look, thorough=compares)
        if compares:
            findings += self._compare(number, look)
        self._tracker.snapshot = None
        if findings:
            self._reporter.tell(findings)

    # Meeting

    def _is_due(self, every: int, number: int) -> bool:
        return bool(every) and number % every == 0 and not self._joins()

    def _meets(self, number: int) -> bool:
        return (self._detects or self._micro_batches is not None) and is_look(number) and not self._joins()

    def _joins(self) -> bool:
        """Whether ranks may be gone that have no more batches: then nobody is asked for anything."""
        wrapper = self._wrapper()
        return wrapper is not None and bool(wrapper._join_config.enable)

    def _meet(self, number: int, look: StepProbe | None, *, thorough: bool) -> list[Finding]:
        """Put the accounts of all ranks together, and judge them: on every rank the same."""
        settled = number in _SETTLED
        mine = self._account(number, look, settled=settled, thorough=thorough)
        accounts: list[RankReport] = self._alarms.gather(f"account/{number}", mine)
        self._strange = ()
        self._ledger.hear(accounts)
        if number == _PACED:
            self._alarms.pace(account.seconds for account in accounts)
        return judge_accounts(accounts, self._watched, settled=settled)

    def _account(self, number: int, look: StepProbe | None, *, settled: bool, thorough: bool) -> RankReport:
        account = RankReport(self._alarms.rank, number)
        if self._detects:
            snapshot = self._tracker.snapshot
            account = self._ledger.account(
                self._alarms.rank, number, look, snapshot, settled=settled, thorough=thorough
            )
        told = () if self._micro_batches is None else self._micro_batches.told()
        seconds = (time.monotonic() - self._began) / (number + 1)
        return replace(account, events=self._strange, micro_batches=told, seconds=seconds)

    def _compare(self, number: int, look: StepProbe | None, *, after_backward: bool = True) -> list[Finding]:
        """Put side by side what the ranks hold, in full only where it differs."""
        trained = {name: p for name, p in self._module.named_parameters() if p.requires_grad and after_backward}
        first = not self._comparisons
        unused = first and not (after_backward or number)
        mine = capture_replica_state(self._module, self._alarms.rank, number, trained, unused=unused)
        if not number:
            mine = replace(mine, constructed=self._constructed, at_first_forward=self._at_first_forward)
        key = f"{self._comparisons}"
        self._comparisons += 1
        alike = len(set(self._alarms.gather(f"digest/{key}", digest_of(mine)))) == 1
        wrapper = self._wrapper()
        if self._alarms.open and look is not None and look.keeps and wrapper is not None:  # everyone is here
            differences = differences_from_average(look.local, wrapper, self._tracker.names)
            mine = replace(mine, values=replace(mine.values, against_local=differences))
            alike &= not any(self._alarms.gather(f"parity/{key}", mine.is_bad))
        if alike:
            return []
        stock = self._alarms.gather(f"stock/{key}", mine)
        return judge_stock(stock, self._watched, number, after_backward=after_backward, first=first)

    def _locate(self, finding: Finding) -> Finding:
        """With the line that makes its first subject."""
        if finding.location or not finding.subjects:
            return finding
        return replace(finding, location=making_of(self._module, finding.subjects[0]))

    def _before_step(self, optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """An optimizer is about to step: on gradients that DDP has averaged, if it ever does."""
        self._tracker.settle()
        rounds = self._tracker.number - self._rounds_at_step.get(optimizer, 0)
        self._rounds_at_step[optimizer] = self._tracker.number
        forwards, self._unsynchronised = self._unsynchronised, 0
        if self._tracker.unreduced and not any(map(callable, (*arguments[1:], *named.values()))):
            self._judge_unreduced(optimizer)
        if rounds or not self._alarms.has_others:  # the healthy step, at no cost for each parameter
            self._steps_alone = self._forwards = 0
            self._keep(_STEP)
            return
        ours = {id(parameter) for parameter in self._tracker.parameters if parameter.grad is not None}
        if not ours:
            self._steps_alone = 0
        elif ours & _held_by(optimizer):
            self._steps_alone += 1
            if self._forwards:  # in which the loss does not come through what they have returned
                self._tracker.asks_parameters = True
            elif self._steps_alone == _STEPS_ALONE and not self._is_superseded(ours):
                self._reporter.tell(judge_alone(self._watched, self._alarms.rank, self.step, forwards=forwards))
        self._forwards = 0

    def _after_step(self, optimizer: Any, *_arguments: Any) -> None:
        """An optimizer has stepped; where it was given a closure, that has run the last passes of the step."""
        if self._tracker.unreduced:
            self._judge_unreduced(optimizer)

    def _judge_unreduced(self, optimizer: Any) -> None:
        """An optimizer uses what backward passes have added to gradients after the last reduction, if there was one."""
        parameters, held = [self._tracker.parameters[index] for index in self._tracker.unreduced], _held_by(optimizer)
        mine = [p for p in parameters if id(p) in held and p.grad is not None]
        if not (mine and self._alarms.has_others and any(bool(p.grad.detach().count_nonzero()) for p in mine)):
            return
        self._tracker.unreduced.clear()
        self._note("step", where=str(user_location() or ""))
        self._tell_events(self.step)

    def _is_superseded(self, parameters: set[int]) -> bool:
        """Whether another wrapper has these parameters too: the model has been wrapped again, or a part of it."""
        others = [wrapper for wrapper in living_wrappers() if wrapper is not self._wrapper()]
        return any(id(parameter) in parameters for other in others for parameter in other.parameters())

    # Events

    def _tell_events(self, number: int) -> None:
        """Have the ranks meet for what the loop has just done."""
        if not self._strange:
            self._strange = (*self._last_round, *self._events)
            self._alarms.post(number)

    def _note(self, kind: str, *, where: str = "") -> None:
        self._keep(LoopEvent(kind, location=where))

    def _keep(self, event: LoopEvent) -> None:
        self._events.append(event)
        if len(self._events) > _EVENTS_KEPT:
            del self._events[0]

    def _describe(self, wrapper: nn.parallel.DistributedDataParallel) -> Watched:
        names = {id(p): name for name, p in self._module.named_parameters()}
        aliases = {of_one[0]: of_one for of_one in all_names(self._module).values() if len(of_one) > 1}
        return Watched(
            names=Names(aliases),
            wrapper=facts_of(wrapper, names),
            trainable=tuple(self._tracker.names),
            broadcasts_buffers=broadcasts_buffers(wrapper),
            wrapper_class=type(wrapper).__name__,
        )


def _held_by(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


_at_exit: WeakSet[Watch] = WeakSet()


@atexit.register
def _leave_all() -> None:
    """A program ends, perhaps by an exception, and has not closed its watches."""
    for watch in list(_at_exit):
        if watch._attached:
            watch._leave(getattr(sys, "last_value", None))
