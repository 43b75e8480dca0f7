"""`watch`: attaches to a wrapper, follows its steps, and has the ranks exchange reports after an alarm."""

from __future__ import annotations

import atexit
import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from traceback import walk_tb
from typing import Any
from weakref import WeakSet

from torch import nn

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.evidence.loop import FunctionCompiled
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import CheckResult, Finding, Report
from ddpcheck.findings.source_lines import exception_location, making_of
from ddpcheck.findings.wording import PARAMETER_MADE
from ddpcheck.gather.ddp.ddp_wrapper import find_wrapper, group_of, is_ddp
from ddpcheck.gather.patching import OF_A_WRAPPER, OwnErrors, Recorder, in_a_line
from ddpcheck.gather.steps.compilations import CompilationRecorder
from ddpcheck.judge.loop.script_wrappers import judge_apart
from ddpcheck.judge.loop.watched_steps import judge_reports
from ddpcheck.judge.replicas.script_changes import judge_ignored
from ddpcheck.monitor.alarms import AlarmBoard
from ddpcheck.monitor.model_parts import ModelParts
from ddpcheck.monitor.options import OnFinding, WatchOptions
from ddpcheck.monitor.other_meshes import OtherMeshes
from ddpcheck.monitor.replica_comparison import ReplicaComparison
from ddpcheck.monitor.reporting import FindingReporter, FindingWarning
from ddpcheck.record.loop.apart_marks import ApartMarks
from ddpcheck.record.loop.bypass_recorder import BypassRecorder
from ddpcheck.record.loop.ignored_data import IgnoredData
from ddpcheck.record.loop.step_recorder import EndedStep, RecorderOptions, StepRecorder
from ddpcheck.record.module_hooks import hold, release
from ddpcheck.stream.rank_report import RankReport, is_settled

_PACED = 16  # the step after which the ranks agree on how often they look for alarms
_COMPILED = 32  # the step from which on ranks compare what they compile: before, one may yet meet its shapes
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
    """Watch a training loop under `DistributedDataParallel` or `fully_shard` until `close`; every rank of it has to.

    The watch lives as long as the module in the wrapper, whoever holds it: also where the wrapper is dropped and
    training goes on without it, which is reported (DDP501).

    Args:
        wrapper: The `DistributedDataParallel`, or a module that holds one (a compiled one, say) or is in one; or the
            outermost module that `fully_shard` was called on, or one that holds it.
        detect_anomalous_params: Find parameters that do not take part in the loss as DDP expects (DDP101 to DDP108),
            before a rank hangs on one. A step that misses a parameter goes on with a gradient of zeros for it, as
            under `find_unused_parameters`.
        check_consistency_every: Compare modules, parameters, buffers and gradients of the ranks every so many
            synchronised backward passes (DDP2xx, 301, 306); 0 for never. Where ranks train apart on purpose (post-local
            SGD), `close` compares whether their parameters were ever the same again.
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
        UsageError: There is no DDP in `wrapper` and no sharded module, or an argument is none of its choices; parity is
            asked for of a sharded module, of which each rank has a part.
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
    """A watch on a wrapper, as `watch` returns it; attached until `close`."""

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
        if options.check_parity_every and not is_ddp(wrapper):
            raise UsageError(
                "check_parity_every compares the gradients that DDP's reducer leaves in .grad; under fully_shard each "
                "rank has only a shard"
            )
        self._options = options
        self._alarms = AlarmBoard(group_of(wrapper), options.timeout)
        first = self._alarms.rank == self._alarms.ranks[0]
        self._reporter = FindingReporter(options, shows_warnings=first, locate=self._locate, reported=reported)
        self._apart = ApartMarks(lambda: self._recorder, under_no_sync=True)
        self._ignored = IgnoredData(lambda: self._recorder, lambda found: self._report(judge_ignored([found])))
        is_due = functools.partial(_is_due, options.check_consistency_every)
        meshes = OtherMeshes(lambda: self._recorder, is_due, self._report)
        self._parts = ModelParts(lambda: self._recorder, options.check_consistency_every, self._report)
        self._recorder = StepRecorder(
            wrapper,
            self,
            RecorderOptions(
                parameters=options.detect_anomalous_params,
                normalisation=options.check_normalisation,
                compares=lambda step: is_due(step) or step == self._comparison.again,
                keeps=functools.partial(_is_due, options.check_parity_every),
                bypassed=lambda: self._bypass.found(),
            ),
            began_alike=began_alike,
            keeps_start=began_alike and bool(options.check_consistency_every),
            listeners=[self._ignored, *([self._apart, meshes, self._parts] if options.check_consistency_every else [])],
        )
        self._compiled: list[FunctionCompiled] = []
        self._compilations = CompilationRecorder(
            self._compiled.append, lambda: self._recorder.module.training, lambda: self.step
        )
        self._bypass = BypassRecorder(self._recorder.module, (), self._recorder.loop.add)
        self._comparison = ReplicaComparison(self._recorder, self._alarms)
        self._attached = True
        self._unwatched: list[CheckResult] = []
        OwnErrors.taken_by = OwnErrors.taken_by or _unwatched
        self._recorder.attach()
        self._compilations.begin()
        if self._recorder.is_sharded:
            self._ignored.begin()
        _at_exit.add(self)
        hold(self._recorder.module, self)

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
        self._recorder.detach()
        self._compilations.close()
        self._bypass.close()
        self._parts.close()
        self._ignored.close()
        release(self._recorder.module, self)
        if OwnErrors.taken_by is _unwatched and not any(watch._attached for watch in _at_exit):
            OwnErrors.taken_by = None
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
        self._alarms.leave((self._comparison.next_key, f"report/{self.step}", "close", "apart"), why)

    def _report_the_rest(self) -> None:
        self._ignored.forward_begins()
        mine, settles = self._recorder.last_report(), self._recorder.settles
        if mine is not None:  # the ranks meet once more where what an option allows for is judged after few steps
            reports = self._alarms.gather("close", mine, at_most=_LAST_WAIT) if settles else [mine]
            self._report(judge_reports(reports, self._recorder.context, settled=settles))
        if (apart := self._apart.at_last()) is not None:
            self._report(
                judge_apart([[of_rank] for of_rank in self._alarms.gather("apart", apart, at_most=_LAST_WAIT)])
            )

    def _report(self, findings: Iterable[Finding]) -> None:
        self._reporter.report(findings)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All that has been found so far, the same on every rank."""
        return tuple(self._reporter.findings)

    @property
    def step(self) -> int:
        """The number of synchronised backward passes that have ended."""
        return self._recorder.step

    @property
    def is_of_living_wrapper(self) -> bool:
        """Whether the wrapper is still there; the module that it wrapped may be trained without it."""
        return self._recorder.wrapper is not None

    def report(self) -> Report:
        """The findings so far as a report, for the renderers."""
        world = {"world_size": len(self._alarms.ranks), "steps": self.step}
        findings = tuple(sorted(self.findings, key=Finding.sort_key))
        checks = tuple(self._unwatched)
        return Report(type(self._recorder.module).__qualname__, world=world, checks=checks, findings=findings)

    def replay_inside(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Use `context()` around a forward pass that is run again to say why a parameter is missing."""
        self._recorder.history.around_replay = context

    def expect(self, loss: Any) -> None:
        """Take `loss` for the output of the forward pass: for frameworks that call backward inside of it."""
        self._recorder.tracker.expect(loss)

    def settle(self) -> None:
        """No further backward pass will come: an optimizer is about to use the gradients.

        The watch notices by itself where the backward pass is over when `Optimizer.step` is called; a framework that
        runs it inside, as a closure, calls this.

        Raises:
            FindingsError: An error was found, and errors are to be raised.
        """
        self._recorder.tracker.settle()

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

    # As the door of the recorder

    def alarm(self, step: int) -> None:
        """Have all ranks exchange reports after this step."""
        self._alarms.post(step)

    def tell(self, report: RankReport) -> None:
        """Report a fault of this rank without the others."""
        self._report(judge_reports([report], self._recorder.context, settled=False))

    def cannot_follow(self) -> None:
        """Say that steps cannot be followed."""
        if self._alarms.rank == self._alarms.ranks[0]:
            warnings.warn(FindingWarning(_HIDDEN), stacklevel=2)

    def left_out(self, step: int) -> None:
        """Have all ranks exchange reports after the next step."""
        self._alarms.post(step + 1)

    def absent(self, report: RankReport) -> None:
        """The alarm has been posted; should the reduction end, the ranks exchange reports."""

    def reduced(self, ended: EndedStep) -> None:
        """Exchange reports and compare replicas, if it is their turn or a rank has posted an alarm."""
        step = ended.number
        if self._alarms.is_checked(step) and self._recorder.notices_unfrozen(ended):
            self._alarms.post(step + 1)
        findings: list[Finding] = []
        if ended.compares or ended.reports or self._alarms.is_posted(step):
            findings += self._exchange_reports(ended)
        if ended.compares:
            findings += self._comparison.compare(step, after_backward=True, probe=ended.probe)
        if findings:
            self._report(findings)

    def _exchange_reports(self, ended: EndedStep) -> list[Finding]:
        """Gather the reports of all ranks, and judge them: the findings are the same on every rank."""
        mine = self._recorder.report(ended)
        if ended.number >= _COMPILED:
            mine = replace(mine, compiled=tuple(self._compiled))
        reports: list[RankReport] = self._alarms.gather(f"report/{ended.number}", mine)
        self._recorder.history.note_reported(reports)
        if ended.number == _PACED:
            self._alarms.set_pace(report.seconds for report in reports)
        return judge_reports(reports, self._recorder.context, settled=is_settled(ended.number))

    def _locate(self, finding: Finding) -> Finding:
        """Add the line that makes the first subject."""
        made = making_of(self._recorder.module, finding.subjects[0]) if finding.subjects else None
        return replace(finding, location=made).relocated(finding.location, PARAMETER_MADE)


_HIDDEN = (
    "ddpcheck does not watch these steps: backward passes run under compiled autograd, in which they cannot be followed"
)


def _is_due(every: int, step: int) -> bool:
    return bool(every) and step % every == 0


_at_exit: WeakSet[Watch] = WeakSet()


def _unwatched(error: Exception, recorder: Recorder) -> None:
    """Have watches go on without a recorder; an error of a function that is told of findings is the user's."""
    if any(frame.f_code is FindingReporter.report.__code__ for frame, _ in walk_tb(error.__traceback__)):
        raise error
    for watch in _at_exit:
        detail = f"not watched from step {watch.step} on: {in_a_line(error)}"
        watch._unwatched += [
            CheckResult(name, "error", detail=detail) for name in recorder.subjects or (recorder.name,)
        ]
        if watch._attached and recorder.subjects == OF_A_WRAPPER:
            watch._leave(error)
    warnings.warn(FindingWarning(f"ddpcheck: {', '.join(recorder.subjects) or recorder.name}: {detail}"), stacklevel=2)


@atexit.register
def _leave_all() -> None:
    """Leave for watches that a program has not closed when it ends, perhaps by an exception."""
    for watch in list(_at_exit):
        if watch._attached:
            watch._leave(getattr(sys, "last_value", None))
