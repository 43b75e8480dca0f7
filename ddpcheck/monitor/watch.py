"""`watch`: attaches to a wrapper, follows its steps, and has the ranks exchange reports after an alarm."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.evidence.parameters import StepEvidence
from ddpcheck.findings.evidence.steps import LoopEvent
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Report
from ddpcheck.findings.source_lines import exception_location, making_of, user_location
from ddpcheck.findings.wording import Names
from ddpcheck.gather.autograd.autograd_graph import all_names
from ddpcheck.gather.ddp.ddp_wrapper import broadcasts_buffers, facts_of, find_wrapper, trains_apart
from ddpcheck.gather.steps.training_step import visible_tensors
from ddpcheck.monitor.alarms import AlarmBoard
from ddpcheck.monitor.forward_snapshot import Snapshot
from ddpcheck.monitor.judging import judge_reports
from ddpcheck.monitor.loop_record import LoopRecord
from ddpcheck.monitor.micro_batches import MicroBatches
from ddpcheck.monitor.module_hooks import hold, release
from ddpcheck.monitor.optimizer_steps import OptimizerSteps
from ddpcheck.monitor.options import OnFinding, WatchOptions
from ddpcheck.monitor.parameter_history import ParameterHistory
from ddpcheck.monitor.replica_comparison import ReplicaComparison
from ddpcheck.monitor.reporting import FindingReporter
from ddpcheck.monitor.step_probe import StepProbe
from ddpcheck.monitor.step_tracker import StepTracker
from ddpcheck.stream.rank_report import FIRST_SETTLED, RankReport, WatchContext, is_probed, is_settled

_PACED = 16  # the step after which the ranks agree on how often they look for alarms
_LAST_WAIT = 10.0  # seconds that ranks wait for each other when the watch closes


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

    The watch lives as long as the module in the wrapper, whoever holds it: also where the wrapper is dropped and
    training goes on without it, which is reported (DDP501).

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
            every rank. Each cause is reported once.
        ignore: Rules that are not reported, by code, prefix of a code or name: for what is so on purpose.
        timeout: Seconds to wait for the other ranks in an exchange or a comparison.

    Returns:
        The watch, which is a context manager.

    Raises:
        UsageError: There is no DDP in `wrapper`, or an argument is none of its choices.
    """
    return Watch(
        wrapper,
        WatchOptions(
            detect_anomalous_params=detect_anomalous_params,
            check_consistency_every=check_consistency_every,
            check_parity_every=check_parity_every,
            check_normalisation=check_normalisation,
            on_finding=on_finding,
            ignore=ignore,
            timeout=timeout,
        ),
    )


class Watch:
    """A watch on a wrapper, as `watch` returns it; attached until `close`.

    A subclass may gather other than from the ranks and judge other than at once: what it then differs in are
    `_report`, `_judge` and `_exchange_reports`, and the board and the comparison that it is made with.
    """

    _completes = True  # gives zeros to DDP where it waits for gradients that do not come
    _settles_at_end = False  # judges what an option allows for by all steps, and not before
    # What a comparison with the average needs of a rank's own gradient.
    _keep: Callable[[torch.Tensor], Any] = staticmethod(torch.Tensor.clone)

    def __init__(
        self,
        wrapper: nn.Module,
        options: WatchOptions,
        *,
        reported: Sequence[Finding] = (),
        began_alike: bool = False,
    ) -> None:
        """Attach to a wrapper.

        Args:
            wrapper: As of `watch`.
            options: As of `watch`.
            reported: Findings that have been reported already.
            began_alike: Whether parameters are known to have been the same on all ranks when the wrapper was made.
        """
        wrapper = find_wrapper(wrapper)
        self._module: nn.Module = wrapper.module
        self._options = options
        self._alarms = self._make_board(wrapper.process_group)
        first = self._alarms.rank == self._alarms.ranks[0]
        self._reporter = FindingReporter(options, shows_warnings=first, locate=self._locate, reported=reported)
        self._loop = LoopRecord(self._alarms)
        self._tracker = StepTracker(wrapper, self._loop, self, completes=self._completes)
        synced = self._tracker.parameters
        self._parameters = dict(zip(synced.names, synced.tensors, strict=True))
        self._context = _context_of(wrapper, synced.names, began_alike=began_alike)
        self._probe: StepProbe | None = None
        self._micro_batches = MicroBatches(synced.tensors) if options.check_normalisation else None
        self._history = ParameterHistory(self._alarms.rank, self._module, self._parameters, self._context.wrapper)
        self._optimizer_steps = OptimizerSteps(self._tracker, self._alarms, self._loop, self._unaveraged)
        keeps_start = began_alike and bool(options.check_consistency_every)
        self._comparison = ReplicaComparison(self._module, synced, self._context, self._alarms, keeps_start=keeps_start)
        self._attached = True
        self._optimizer_steps.attach()
        self._tracker.attach()
        _at_exit.add(self)
        self._loop.attach(wrapper)
        hold(self._module, self)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        self.close(failing=error is not None)

    def close(self, *, failing: bool = False) -> None:
        """Leave the wrapper as it was; may be called again.

        Findings of the last steps that this rank has alone are reported without the others, which are not asked.

        Args:
            failing: Whether the loop has ended in an exception of its own; then nothing is reported.

        Raises:
            FindingsError: There is an error among them, and errors are to be raised.
        """
        was_attached, self._attached = self._attached, False
        self._detach()
        if not was_attached:
            return
        if failing:
            self._leave(sys.exc_info()[1])
            return
        try:
            self._report_the_rest()
        finally:
            self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        """Tell the ranks that wait at the next exchange or comparison that this rank does not come."""
        why = "has closed its watch"
        if error is not None:
            where = exception_location(error)
            why = f"has stopped with {type(error).__name__}{f' at {where}' if where else ''}"
        self._alarms.leave((self._comparison.next_key, f"report/{self.step}", "close"), why)

    def _report_the_rest(self) -> None:
        tolerates_unused = self._context.wrapper.tolerates_unused and self._options.detect_anomalous_params
        if tolerates_unused and 2 < self.step and (self._settles_at_end or self.step <= FIRST_SETTLED):
            # Never used parameters are judged after more steps than there have been; the ranks meet once more for it.
            mine = self._history.report(self.step - 1, settled=True)
            self._judge(self._alarms.gather("close", mine, at_most=_LAST_WAIT), settled=True)
        elif self._history.not_reported or self._loop.to_report:
            mine = self._history.report(self.step, settled=False)
            self._judge([replace(mine, events=self._loop.to_report)])

    def _unaveraged(self, under_no_sync: bool) -> None:
        """Report optimizer steps on gradients that were not averaged."""
        where = str(user_location() or "")
        what = LoopEvent("enter no_sync") if under_no_sync else LoopEvent("forward inside", location=self._inside())
        self._tell(what, LoopEvent("step", location=where))

    def _inside(self) -> str:
        """The line that calls the module inside of the wrapper, as "path:line"; empty where that is not known."""
        return ""

    def _tell(self, *events: LoopEvent) -> None:
        """Report events that show a fault on this rank, whatever the others do."""
        self._judge([RankReport(StepEvidence(self._alarms.rank, self.step, {}), events=events)])

    def _judge(self, reports: Sequence[RankReport], *, settled: bool = False) -> None:
        """Report the findings on reports of ranks."""
        self._report(judge_reports(reports, self._context, settled=settled))

    def _report(self, findings: Iterable[Finding]) -> None:
        self._reporter.report(findings)

    def _make_board(self, group: Any) -> AlarmBoard:
        return AlarmBoard(group, self._options.timeout)

    def _detach(self) -> None:
        self._tracker.detach()
        self._loop.detach(self._tracker.wrapper)
        release(self._module, self)
        self._optimizer_steps.detach()
        if self._micro_batches is not None:
            self._micro_batches.close()
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All that has been found so far, the same on every rank."""
        return tuple(self._reporter.findings)

    @property
    def step(self) -> int:
        """The number of synchronised backward passes that have ended."""
        return self._tracker.number

    @property
    def is_of_living_wrapper(self) -> bool:
        """Whether the wrapper is still there; the module that it wrapped may be trained without it."""
        return self._tracker.wrapper is not None

    def report(self) -> Report:
        """The findings so far as a report, for the renderers."""
        world = {"world_size": len(self._alarms.ranks), "steps": self.step}
        findings = tuple(sorted(self.findings, key=Finding.sort_key))
        return Report(type(self._module).__qualname__, world=world, findings=findings)

    def replay_inside(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Use `context()` around a forward pass that is run again to say why a parameter is missing."""
        self._history.around_replay = context

    def expect(self, loss: Any) -> None:
        """Take `loss` for the output of the forward pass: for frameworks that call backward inside of it."""
        self._tracker.expect(loss)

    def settle(self) -> None:
        """No further backward pass will come: an optimizer is about to use the gradients.

        The watch notices by itself where the backward pass is over when `Optimizer.step` is called; a framework that
        runs it inside, as a closure, calls this.

        Raises:
            FindingsError: An error was found, and errors are to be raised.
        """
        self._tracker.settle()

    def compare(self) -> list[Finding]:
        """Compare modules, parameters and buffers of the ranks now; every rank of the group has to call this.

        Returns:
            The findings, which have also been reported.

        Raises:
            FindingsError: There is an error among them, and errors are to be raised.
        """
        found = self._comparison.compare(self.step, after_backward=False)
        self._report(found)
        return found

    # As the listener of the tracker

    def forward_begins(self) -> None:
        """Keep what the comparison needs of the time before it."""
        self._comparison.forward_begins()

    def step_begins(self, step: int) -> None:
        """Probe the step, if it is its turn."""
        keeps = self._is_due(self._options.check_parity_every, step)
        if self._probe is not None:
            self._probe.attach()
        elif (self._options.detect_anomalous_params and self._exchanges(step)) or keeps:
            self._probe = StepProbe(self._module, self._parameters, keep=self._keep if keeps else None)

    def forward_returned(self, step: int, output: Any, tensors: Sequence[torch.Tensor], *, synced: bool) -> None:
        """Measure the micro-batch, and probe a forward pass of the step."""
        if self._compares(step):
            self._comparison.forward_returned()
        if self._micro_batches is not None:
            self._micro_batches.forward_returned(step, output)
        if synced and self._probe is not None:
            self._probe.forward_returned(tensors)
        if synced and step == 0 and self._options.detect_anomalous_params and self._context.wrapper.tolerates_unused:
            visible, opaque = visible_tensors([output])
            if opaque and not visible:  # DDP may well raise in this backward pass, so this cannot wait
                self._judge([RankReport(StepEvidence(self._alarms.rank, step, {}, output_type=opaque))])

    def backward_begins(self) -> None:
        """Probe a backward pass of the step."""
        if self._probe is not None:
            self._probe.backward_begins()

    def parameters_missing(self, step: int, names: Sequence[str]) -> None:
        """Have the ranks exchange reports, unless all of them know of these."""
        if self._probe is not None:
            self._probe.detach()
        if self._options.detect_anomalous_params and not self._history.is_reported(names):
            self._alarms.post(step)

    def static_graph_broken(self, step: int, names: Sequence[str]) -> None:
        """Report it at once: DDP is about to raise on this rank."""
        if self._options.detect_anomalous_params:
            probed = StepEvidence(self._alarms.rank, step, {})
            self._judge([RankReport(probed, missing={0: tuple(names), step: ()})])

    def step_ended(self, step: int, unused: frozenset[str], awaited: frozenset[str], snapshot: Snapshot | None) -> None:
        """Exchange reports and compare replicas, if it is their turn or a rank has posted an alarm."""
        if self._micro_batches is not None:
            self._micro_batches.step_ended()
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.close()
        if self._options.detect_anomalous_params:
            self._history.step_ended(step, probe, unused, awaited, self._tracker.accumulated)
            if probe is None and self._alarms.is_checked(step) and self._history.notices_unfrozen():
                self._alarms.post(step + 1)
        self._loop.step_ended(step)
        findings: list[Finding] = []
        compares = self._compares(step) and (self._completes or not awaited)  # else DDP has not averaged
        if compares or self._exchanges(step) or self._alarms.is_posted(step):
            findings += self._exchange_reports(step, probe, snapshot, thorough=compares)
        if compares:
            findings += self._comparison.compare(step, after_backward=True, probe=probe)
        if findings:
            self._report(findings)

    # Reports of the ranks

    def _is_due(self, every: int, step: int) -> bool:
        return bool(every) and step % every == 0 and not self._are_apart()

    def _compares(self, step: int) -> bool:
        options = self._options
        return self._is_due(options.check_parity_every, step) or self._is_due(options.check_consistency_every, step)

    def _exchanges(self, step: int) -> bool:
        """Whether the ranks exchange reports after a step without any alarm."""
        wanted = self._options.detect_anomalous_params or self._micro_batches is not None
        return wanted and is_probed(step) and not self._are_apart()

    def _are_apart(self) -> bool:
        """Whether ranks without further batches may have left the loop (`Join`), or all train apart: none compares."""
        wrapper = self._tracker.wrapper
        return wrapper is not None and (bool(wrapper._join_config.enable) or trains_apart(wrapper))

    def _exchange_reports(
        self, step: int, probe: StepProbe | None, snapshot: Snapshot | None, *, thorough: bool
    ) -> list[Finding]:
        """Gather the reports of all ranks, and judge them: the findings are the same on every rank."""
        mine = self._own_report(step, probe, snapshot, thorough=thorough)
        reports: list[RankReport] = self._alarms.gather(f"report/{step}", mine)
        self._history.note_reported(reports)
        if step == _PACED:
            self._alarms.set_pace(report.seconds for report in reports)
        return judge_reports(reports, self._context, settled=is_settled(step))

    def _own_report(
        self, step: int, probe: StepProbe | None, snapshot: Snapshot | None, *, thorough: bool
    ) -> RankReport:
        settled = is_settled(step)
        mine = RankReport(StepEvidence(self._alarms.rank, step, {}))
        if self._options.detect_anomalous_params:
            mine = self._history.report(step, probe=probe, snapshot=snapshot, settled=settled, thorough=thorough)
        measured = () if self._micro_batches is None else self._micro_batches.measured()
        seconds = self._alarms.seconds_a_step(step)
        events, self._loop.to_report = self._loop.to_report, ()
        return replace(mine, events=events, micro_batches=measured, seconds=seconds)

    def _locate(self, finding: Finding) -> Finding:
        """Add the line that makes the first subject."""
        if finding.location or not finding.subjects:
            return finding
        return replace(finding, location=making_of(self._module, finding.subjects[0]))


def _context_of(
    wrapper: nn.parallel.DistributedDataParallel, synced: Sequence[str], *, began_alike: bool
) -> WatchContext:
    module = wrapper.module
    aliases = {of_one[0]: of_one for of_one in all_names(module).values() if len(of_one) > 1}
    return WatchContext(
        Names(aliases),
        facts_of(wrapper, {id(p): name for name, p in module.named_parameters()}),
        world_size=dist.get_world_size(wrapper.process_group),
        broadcasts_buffers=broadcasts_buffers(wrapper),
        wrapper_class=type(wrapper).__name__,
        trainable=tuple(synced),
        began_alike=began_alike,
    )


_at_exit: WeakSet[Watch] = WeakSet()


@atexit.register
def _leave_all() -> None:
    """Leave for watches that a program has not closed when it ends, perhaps by an exception."""
    for watch in list(_at_exit):
        if watch._attached:
            watch._leave(getattr(sys, "last_value", None))
