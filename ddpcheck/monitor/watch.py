"""`watch`: attach to a wrapper, follow its steps, and exchange reports after alarms."""

from __future__ import annotations

import atexit
import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from traceback import walk_tb
from typing import Any
from weakref import WeakSet

from torch import nn

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.evidence.loop import FunctionCompiled
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import CheckResult, Finding, Report
from ddpcheck.findings.source_lines import assignment_of_parameter, exception_location
from ddpcheck.findings.wording import PARAMETER_MADE
from ddpcheck.gather.ddp.ddp_wrapper import find_wrapper, group_of, is_ddp
from ddpcheck.gather.patching import OF_A_WRAPPER, ErrorGuard, Recorder, one_line_error
from ddpcheck.gather.steps.compilations import CompilationRecorder
from ddpcheck.monitor.alarms import AlarmBoard
from ddpcheck.monitor.comparisons import MeshComparison, ReplicaComparison, SplitModelComparison
from ddpcheck.monitor.reporting import FindingReporter, FindingWarning, OnFinding, WatchOptions
from ddpcheck.record.loop.step_recorder import EndedStep, StepRecorder
from ddpcheck.record.loop.wrapper_checks import IgnoredData, LocalSgdTracker
from ddpcheck.record.recording import keep_alive, stop_keeping_alive
from ddpcheck.rules.parameters.step_reports import judge_reports
from ddpcheck.rules.replicas.ddp306_state_diverged import judge_local_sgd
from ddpcheck.rules.replicas.ddp503_changed_after_wrapping import judge_assigned
from ddpcheck.stream.rank_report import RankReport, is_settled

_PACE_STEP = 16  # step after which the ranks agree on the interval of alarm checks
_COMPILED_STEP = 32  # first step at which ranks compare compilations; earlier, a rank may still see new shapes
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
    """Watch a training loop under `DistributedDataParallel` or `fully_shard` until `close`, on every rank.

    The watch lives as long as the wrapped module, even if the wrapper is dropped and training continues without it,
    which is reported (DDP501).

    Args:
        wrapper: The `DistributedDataParallel`, or a module that contains it (a compiled module, say) or is part of it;
            or the outermost module sharded by `fully_shard`, or a module that contains it.
        detect_anomalous_params: Find parameters that do not take part in the loss as DDP expects (DDP101 to DDP108),
            before a rank hangs. In a step that misses a parameter, its gradient is zero, as under
            `find_unused_parameters`.
        check_consistency_every: Compare modules, parameters, buffers and gradients of the ranks every so many
            synchronized backward passes (DDP2xx, 301, 306); 0 for never. If ranks train independently on purpose
            (post-local SGD), `close` checks if their parameters were ever equal again.
        check_parity_every: Every so many synchronized backward passes, average the ranks' own gradients by an
            additional all-reduce, and compare the result with `.grad` after DDP's reducer (DDP302, 303); 0 for never.
        check_normalisation: Measure, in optimizer steps 0, 1, 2, 4, 8 ..., the weight of each target's (token's, say)
            cross entropy in the step, and find means of means over unequal micro-batches or ranks (DDP514, 305).
        on_finding: "raise" raises `FindingsError` for errors, on all ranks in the same backward pass, and warns of the
            rest; "warn" warns of both, on the first rank of the group; a function is called with each `Finding` on
            every rank. Each cause is reported once.
        ignore: Rules that are not reported because the behavior is intended, by code, prefix of a code or name.
        timeout: Seconds to wait for the other ranks in an exchange or a comparison.

    Returns:
        The watch, which is a context manager.

    Raises:
        UsageError: `wrapper` has no DDP and no sharded module, an argument has an invalid value, or parity is requested
            for a sharded module.
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
    """Watch on a wrapper, returned by `watch`; attached until `close`."""

    def __init__(
        self, wrapper: nn.Module, options: WatchOptions, *, reported: Sequence[Finding] = (), began_alike: bool = False
    ) -> None:
        """Attach to a wrapper.

        `reported`: findings already reported; `began_alike`: all ranks constructed the wrapper with equal parameters.
        """
        wrapper = find_wrapper(wrapper)
        if options.check_parity_every and not is_ddp(wrapper):
            raise UsageError(
                "check_parity_every compares the gradients that DDP's reducer leaves in .grad; under fully_shard each "
                "rank has only a shard"
            )
        self._options = options
        self._alarms = AlarmBoard(group_of(wrapper), options.timeout)
        is_first = self._alarms.rank == self._alarms.ranks[0]
        self._reporter = FindingReporter(options, shows_warnings=is_first, locate=self._locate, reported=reported)
        self._report = self._reporter.report
        self._local_sgd = LocalSgdTracker(lambda: self._recorder, under_no_sync=True)
        self._ignored = IgnoredData(lambda: self._recorder, lambda entry: self._report(judge_assigned([entry])))
        is_due = functools.partial(_is_due, options.check_consistency_every)
        meshes = MeshComparison(lambda: self._recorder, is_due, self._report)
        self._parts = SplitModelComparison(lambda: self._recorder, options.check_consistency_every, self._report)
        self._recorder = StepRecorder(
            wrapper,
            self,
            checks_parameters=options.detect_anomalous_params,
            checks_weights=options.check_normalisation,
            compares=lambda step: is_due(step) or step == self._comparison.again,
            keeps=functools.partial(_is_due, options.check_parity_every),
            is_live=True,
            began_alike=began_alike,
            keeps_start=began_alike and bool(options.check_consistency_every),
            listeners=[
                self._ignored,
                *([self._local_sgd, meshes, self._parts] if options.check_consistency_every else []),
            ],
        )
        self._compiled: list[FunctionCompiled] = []
        self._compilations = CompilationRecorder(
            self._compiled.append, lambda: self._recorder.module.training, lambda: self.step
        )
        self._comparison = ReplicaComparison(self._recorder, self._alarms)
        self._is_attached = True
        self._failed_checks: list[CheckResult] = []
        ErrorGuard.error_handler = ErrorGuard.error_handler or _disable_recorder
        self._recorder.attach()
        self._compilations.begin()
        if self._recorder.is_sharded:
            self._ignored.begin()
        _open_watches.add(self)
        keep_alive(self._recorder.module, self)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        self.close(failing=error is not None)

    def close(self, *, failing: bool = False) -> None:
        """Detach from the wrapper; may be called again.

        Findings in the last steps that only this rank has are reported without asking the other ranks.

        Args:
            failing: True if the loop has ended in an exception; then nothing is reported.

        Raises:
            FindingsError: A finding is an error and `on_finding` is "raise".
        """
        was_attached, self._is_attached = self._is_attached, False
        self._recorder.detach()
        self._compilations.close()
        self._parts.close()
        self._ignored.close()
        stop_keeping_alive(self._recorder.module, self)
        if ErrorGuard.error_handler is _disable_recorder and not any(watch._is_attached for watch in _open_watches):
            ErrorGuard.error_handler = None
        if not was_attached:
            return
        if failing:
            self._leave(sys.exc_info()[1])
            return
        try:
            self._report_last_steps()
        finally:
            self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        why = "has closed its watch"
        if error is not None:
            location = exception_location(error)
            why = f"has stopped with {type(error).__name__}{f' at {location}' if location else ''}"
        self._alarms.leave((self._comparison.next_key, f"report/{self.step}", "close", "apart"), why)

    def _report_last_steps(self) -> None:
        self._ignored.forward_begins()
        own_report, settles = self._recorder.last_report(), self._recorder.judges_at_end
        if own_report is not None:  # ranks exchange reports if an option is still to be judged after few steps
            reports = self._alarms.gather("close", own_report, at_most=_LAST_WAIT) if settles else [own_report]
            self._report(judge_reports(reports, self._recorder.context, settled=settles))
        if (marks := self._local_sgd.final_entry()) is not None:
            marks_by_rank = self._alarms.gather("apart", marks, at_most=_LAST_WAIT)
            self._report(judge_local_sgd([[rank_marks] for rank_marks in marks_by_rank]))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return all findings so far, the same on every rank."""
        return tuple(self._reporter.findings)

    @property
    def step(self) -> int:
        """Return the number of synchronized backward passes that have ended."""
        return self._recorder.step

    @property
    def has_live_wrapper(self) -> bool:
        """Return True if the wrapper still exists (the module may outlive it)."""
        return self._recorder.wrapper is not None

    def report(self) -> Report:
        """Return the findings so far as a report for the renderers."""
        world = {"world_size": len(self._alarms.ranks), "steps": self.step}
        findings = tuple(sorted(self.findings, key=Finding.sort_key))
        name = type(self._recorder.module).__qualname__
        return Report(name, world=world, checks=tuple(self._failed_checks), findings=findings)

    def replay_inside(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Set the context in which forward is repeated to find why parameters are missing."""
        self._recorder.history.around_replay = context

    def expect(self, loss: Any) -> None:
        """Treat `loss` as the forward output, for frameworks that call backward inside forward."""
        self._recorder.tracker.expect(loss)

    def settle(self) -> None:
        """Record that no further backward pass follows before the optimizer step.

        Only needed by frameworks that run backward inside `Optimizer.step`, as a closure; otherwise the watch detects
        the end of backward when `Optimizer.step` is called.

        Raises:
            FindingsError: A finding is an error and `on_finding` is "raise".
        """
        self._recorder.tracker.end_pending_step()

    def compare(self) -> list[Finding]:
        """Compare modules, parameters and buffers of the ranks now, on every rank.

        Returns:
            The findings, which have also been reported.

        Raises:
            FindingsError: A finding is an error and `on_finding` is "raise".
        """
        findings = self._comparison.compare(self.step, after_backward=False)
        self._report(findings)
        return findings

    # Callbacks of the recorder

    def alarm(self, step: int) -> None:
        """Request an exchange of reports by all ranks after step `step`."""
        self._alarms.post(step)

    def report_now(self, report: RankReport) -> None:
        """Judge and report a fault of this rank, without waiting for the other ranks."""
        self._report(judge_reports([report], self._recorder.context, settled=False))

    def cannot_follow(self) -> None:
        if self._alarms.rank == self._alarms.ranks[0]:
            text = "ddpcheck does not watch these steps: backward passes run under compiled autograd, in which they"
            warnings.warn(FindingWarning(f"{text} cannot be followed"), stacklevel=2)

    def left_out(self, step: int) -> None:
        """Request an exchange of reports after step `step + 1`, since `step` missed parameters."""
        self._alarms.post(step + 1)

    def absent(self, report: RankReport) -> None:
        """Do nothing about shards that backward will not reach: `alarm` has already requested reports."""

    def reduced(self, ended: EndedStep) -> None:
        """Handle an ended step: exchange reports and compare replicas, if due or requested."""
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
        own_report = self._recorder.report(ended)
        if ended.number >= _COMPILED_STEP:
            own_report = replace(own_report, compiled=tuple(self._compiled))
        reports: list[RankReport] = self._alarms.gather(f"report/{ended.number}", own_report)
        self._recorder.history.note_reported(reports)
        if ended.number == _PACE_STEP:
            self._alarms.set_pace(report.seconds for report in reports)
        return judge_reports(reports, self._recorder.context, settled=is_settled(ended.number))

    def _locate(self, finding: Finding) -> Finding:
        """Add the line that creates the parameter that a finding names first."""
        location = assignment_of_parameter(self._recorder.module, finding.subjects[0]) if finding.subjects else None
        return replace(finding, location=location).relocated(finding.location, PARAMETER_MADE)


def _is_due(every: int, step: int) -> bool:
    return bool(every) and step % every == 0


_open_watches: WeakSet[Watch] = WeakSet()


def _disable_recorder(error: Exception, recorder: Recorder) -> None:
    """Disable a failed recorder in all watches; re-raise errors of user functions."""
    if any(frame.f_code is FindingReporter.report.__code__ for frame, _ in walk_tb(error.__traceback__)):
        raise error
    detail = one_line_error(error)  # if every watch has been freed
    for watch in _open_watches:
        detail = f"not watched from step {watch.step} on: {one_line_error(error)}"
        names = recorder.subjects or (recorder.name,)
        watch._failed_checks += [CheckResult(name, "error", detail=detail) for name in names]
        if watch._is_attached and recorder.subjects == OF_A_WRAPPER:
            watch._leave(error)
    warnings.warn(FindingWarning(f"ddpcheck: {', '.join(recorder.subjects) or recorder.name}: {detail}"), stacklevel=2)


@atexit.register
def _leave_all() -> None:
    for watch in list(_open_watches):
        if watch._is_attached:
            watch._leave(getattr(sys, "last_value", None))
