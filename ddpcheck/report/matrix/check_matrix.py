"""`check_matrix(recipe)`: tries DDP options on a model, from the same states and against the same references.

What the options cannot change is computed once: each rank's own steps, their averages, the single process. Each row
then wraps a freshly built module, goes through the same steps from the same states, and is judged as a check would.

This module is light: torch is only imported on the ranks.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ddpcheck.findings.errors import EXIT_HANG, DdpcheckError, RankError
from ddpcheck.findings.report import Location, ReportError
from ddpcheck.findings.severity import Severity
from ddpcheck.harness import RankHosts
from ddpcheck.report import calls
from ddpcheck.report.checking.check import CheckRun, ask
from ddpcheck.report.checking.check_state import CheckOptions, CheckState
from ddpcheck.report.checking.check_worlds import CheckStopped, OptionsStopped
from ddpcheck.report.matrix.advice import advise
from ddpcheck.report.matrix.matrix import Matrix, MatrixRow, StepTime, Verdict
from ddpcheck.report.matrix.option_sets import DEFAULTS, DdpOptions, ModelFacts, OptionSet, first_trials, further_trials
from ddpcheck.report.settings import rule_patterns

if TYPE_CHECKING:
    from ddpcheck.recipe.recipe import Recipe

_WARM_UP = 2
_FEWEST_PAIRS, _MOST_PAIRS = 5, 101
_SECONDS_A_ROW = 1.0
_EPS = {64: 2.3e-16, 32: 1.2e-7, 16: 7.9e-3}  # machine epsilon by the bits of a gradient, of the coarser dtype at 16


def check_matrix(
    target: Recipe | str,
    *,
    world_size: int = 2,
    backend: str | None = None,
    device: str = "cpu",
    steps: int = 3,
    timeout: float = 30.0,
    seed: int = 0,
    preload: Sequence[str] = (),
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    step_times: bool = True,
    progress: Callable[[str], None] | None = None,
    hosts: RankHosts | None = None,
) -> Matrix:
    """Run a recipe under the sensible combinations of the options of the installed `DistributedDataParallel`.

    A recipe that makes its wrapper itself gets the options all the same: they replace those that its own call of the
    `DistributedDataParallel` constructor gives.

    Args:
        target: A `Recipe`, or a TARGET ("path/to/file.py:attr"), which is loaded on the ranks and not here.
        world_size: Number of ranks.
        backend: "gloo" or "nccl"; default: nccl where every rank has a GPU of its own, else gloo.
        device: "cpu" or "cuda".
        steps: Training steps to run in each row.
        timeout: Seconds that one phase of a row may take before it counts as a hang; one that hangs costs its row.
        seed: Of all random numbers.
        preload: Modules that are imported once, before ranks are forked; see `World`.
        select: Codes, prefixes or names of the rules that may decide a verdict; default: all.
        ignore: Those that may not.
        step_times: Whether to measure how long a step takes under each row that is right.
        progress: Called with a few words at the beginning of each phase.
        hosts: As for `ddpcheck.check`.

    Returns:
        The matrix. A target that fails, or hangs, whatever the options are, is in `Matrix.error`.

    Raises:
        UsageError: An argument is wrong, or `target` names no recipe.
    """
    asked = ask(
        target,
        world_size=world_size,
        backend=backend,
        device=device,
        steps=steps,
        timeout=timeout,
        seed=seed,
        preload=preload,
        hosts=hosts,
    )
    select, ignore = rule_patterns("select", select), rule_patterns("ignore", ignore)
    sweep = _Sweep(target, asked, select=select, ignore=ignore, progress=progress or (lambda _text: None), hosts=hosts)
    return sweep.matrix(step_times=step_times)


class _Sweep(CheckRun):
    """A check whose steps are kept, so that they can be gone through again under other options.

    `outcome` is that of the row under way, and before the rows that of the reference.
    """

    def __init__(
        self,
        target: Recipe | str,
        asked: CheckOptions,
        *,
        select: Sequence[str],
        ignore: Sequence[str],
        progress: Callable[[str], None],
        hosts: RankHosts | None,
    ) -> None:
        super().__init__(target, asked, progress=progress, hosts=hosts)
        self._rules = {"select": select, "ignore": ignore}
        self._references: dict[bool, CheckState] = {}  # by whether the wrapper broadcasts buffers
        self._kept: set[bool] = set()  # those whose steps are on the ranks of this world
        self._synced = False  # the first of them
        self._reference_options: DdpOptions | None = None  # those of its wrapper
        self._module_locations: dict[str, Location] = {}
        self._facts = ModelFacts()
        self._baseline: DdpOptions | None = None
        self._noise: float | None = None
        self._rows: list[MatrixRow] = []
        self._resisting: dict[str, Any] = {}
        self._said: list[str] = []
        self._buffers_matter = False
        self._expected = 1
        self._words = ""
        self._bug: ReportError | None = None  # of ddpcheck, in a row

    def matrix(self, *, step_times: bool) -> Matrix:
        """Run everything, whatever happens on the way."""
        begun = time.perf_counter()
        self._timing = step_times
        error = None
        with contextlib.ExitStack() as stack:
            try:
                self._start_worlds(stack)
                self._prepare()
                self._run_first_reference()
            except CheckStopped:
                pass
            except RankError as failure:
                self._fail(failure)
            except DdpcheckError:
                raise
            except Exception as failure:
                self._fail_by_bug(failure)
            reference = self.outcome
            if self._single_hang and reference.error is None:
                reference.error = ReportError(self._single_hang, EXIT_HANG)
            if reference.error is not None or not self._references:
                reference.judge({})
                error = reference.error
                self._rows = [self._judged(reference, DEFAULTS, own=True)]
            else:
                self._module_locations = self._locate_module()
                self._run_rows()
        notes = list(dict.fromkeys([*reference.notes, *self._said]))
        report = reference.report()
        return Matrix(
            target=report.target,
            rows=tuple(self._rows),
            advice=advise(self._rows, noise=self._noise),
            environment=report.environment,
            world={**report.world, "notes": notes},
            noise=self._noise,
            timing={**report.timing, "total": round(time.perf_counter() - begun, 4)},
            error=error or self._bug or next(iter(reference.bugs), None),
            tool=report.tool,
        )

    # What the options cannot change

    def _run_first_reference(self) -> None:
        """With the recipe's own options; where no wrapper can be made with those, with torch's defaults."""
        outcome = self.outcome.fork()
        try:
            self._run_reference(None)
        except OptionsStopped:
            stopped, self.outcome = self.outcome, outcome
            self._reference_options = DEFAULTS
            self._replace_world()
            try:
                self._run_reference(DEFAULTS)
            except OptionsStopped:  # what the matrix does not set differs as well
                self.outcome = stopped
                raise

    def _run_reference(self, options: DdpOptions | None) -> None:
        """Go through the steps without the wrapper, and keep what each begins from and comes to."""
        with self._phase("wrapping", "wrapping the model"):
            wrapped = self._wrap(calls.matrix_phases.begin_reference, options)
            found, notes = list(self.outcome.findings), list(self.outcome.notes)
            self.outcome.wrapped = wrapped
            self._check_after_wrapping(wrapped)  # for the names and the state; findings and notes come with each row
            self.outcome.findings, self.outcome.ddp_skipped = found, ""
            self.outcome.notes = notes + self._all(calls.session.notes)[0]
            if not self._references:
                self._synced = wrapped[0].broadcasts_buffers
                by_rank: list[ModelFacts] = self._all(calls.matrix_phases.facts)
                same = all(facts.own == by_rank[0].own for facts in by_rank)
                self._facts = by_rank[0] if same else replace(by_rank[0], own=None)
                self._resisting = self._all(calls.matrix_phases.resisting, DdpOptions(self._facts.own or {}))[0]
        self._run_steps()
        if not self._references:
            drifted = any(item.buffers != self.outcome.local[0].buffers for item in self.outcome.local)
            apart = any(item.buffers != wrapped[0].buffers for item in wrapped)
            self._facts = replace(self._facts, buffers_differ=apart, absent=self.outcome.absent())
            self._buffers_matter = drifted or apart
            self._kept.add(self._synced)
        self._references[wrapped[0].broadcasts_buffers] = self.outcome

    def _train(self, step: int, words: str) -> bool:
        self._all(calls.matrix_phases.keep_step, step)
        return False

    def _update_alone(self, step: int, words: str) -> None:
        with self._phase("parameters", f"{words}: the optimizer"):
            self._all(calls.local_step.local_update, step)
            if not self.outcome.ranks_apart:
                self._all(calls.matrix_phases.share_parameters)  # optimizers that differ are a matter of each row

    def _kept_other(self, synced: bool) -> None:
        """The reference for wrappers that treat buffers in the other way, where that makes a difference."""
        options = DEFAULTS if synced else DdpOptions({self._buffer_option: False})
        if synced not in self._references:
            built = {name: self.outcome.timing.get(name, 0.0) for name in ("model", "consistency")}
            row, self.outcome = self.outcome, CheckState(self.asked, timing=built)  # of the same model as the others
            self._settle_single(self._start_single(self._earlier[0]))
            self._run_reference(options)
            self.outcome = row
        elif synced not in self._kept:
            self._keep_again(options)
        self._kept.add(synced)

    @property
    def _buffer_option(self) -> str:
        return next(name for name in ("forward_sync_buffers", "broadcast_buffers") if name in self._facts.known)

    def _restart(self) -> None:
        """A world for the rows that are left after one that took its world with it; the references are known."""
        self._replace_world()
        self._keep_again(self._reference_options)
        self._kept = {self._synced}
        if self._baseline is not None:
            self._all(calls.matrix_phases.begin_row, self._baseline)
            self._all(calls.matrix_phases.keep_baseline)

    def _replace_world(self) -> None:
        self.world.close()
        self.world = self._worlds.enter_context(self._make_world(self.asked.world_size, group=True))
        self._all(calls.session.build, self.target, self.asked.seed)

    def _keep_again(self, options: DdpOptions | None) -> None:
        """The steps of the ranks by themselves, without what has been judged already."""
        self._all(calls.matrix_phases.begin_reference, options)
        for step in range(self.asked.steps):
            self._all(calls.local_step.begin_step, step, None)
            self._all(calls.local_step.local_step, step)
            self._all(calls.local_step.average, step, None)
            self._all(calls.matrix_phases.keep_step, step)
            self._update_alone(step, "again")

    # Rows

    def _run_rows(self) -> None:
        own, rows = self._own_options(), self._rows
        if not self._references[self._synced].wrapped[0].facts.is_ddp:
            self._try(OptionSet(own), is_own=True)
            return
        first = first_trials(self._facts)
        spelled_out = self._facts.own is not None  # else the recipe's own are several, and none of the others
        queue = [options for options in first if not (spelled_out and options == own)]
        queue.insert(0 if spelled_out and own == DEFAULTS else 1, own)
        self._expected = len(queue) + len(further_trials(self._facts, DEFAULTS, []))
        for options in queue:
            self._try(OptionSet(options), is_own=options is own)
        right = [row.options for row in rows if row.fine and not row.label]
        base = next((options for options in first if options in right), next(iter(right), DEFAULTS))
        graphs = [options for options in first if options in right and options != DEFAULTS]
        if right or not any(row.failure is not None and row.failure.exit_code == EXIT_HANG for row in rows):
            for trial in further_trials(self._facts, base, graphs):
                if trial.options != own:
                    self._try(trial)
        else:
            self._said.append(
                "no further options were tried: nothing is right so far, and each row that hangs takes "
                f"{self.asked.timeout:g} s"
            )
        rows.sort(key=lambda row: not row.own)

    def _own_options(self) -> DdpOptions:
        """Those of the recipe that are not torch's defaults."""
        own = {**(self._facts.own or {}), **self._resisting}
        broadcast = ("broadcast_buffers", "forward_sync_buffers")
        return DdpOptions(
            {
                name: value
                for name, value in own.items()
                if (value is False if name in broadcast else value not in (None, False))
            }
        )

    def _try(self, trial: OptionSet, *, is_own: bool = False) -> None:
        """One row, whatever happens in it."""
        options = trial.options
        if trial.pointless:
            self._rows.append(MatrixRow(options.arguments, "skipped", hook=options.hook, reason=trial.pointless))
            return
        if trial.forbidden:
            row = MatrixRow(options.arguments, "stops", hook=options.hook, code="DDP104", reason=trial.forbidden)
            self._rows.append(row)
            return
        self._words = f"options {len(self._rows) + 1} of about {self._expected}: {options}"
        self.outcome = self._references[self._synced].fork()
        resisting: dict[str, Any] = {}
        try:
            if self.world.failed:
                self.progress(f"{self._words}: a new world")
                self._restart()
            with self._phase("wrapping", f"{self._words}: wrapping"):
                synced = self._begin_row(None if is_own else options)
                resisting = {} if is_own else self._all(calls.matrix_phases.resisting, options)[0]
            if not resisting:
                self._go_through_steps(synced)
        except CheckStopped:
            pass
        except RankError as error:
            self._fail(error)
        except DdpcheckError:
            raise
        except Exception as error:
            self._fail_by_bug(error)
        if resisting:
            set_by_wrap = ", ".join(f"{name}={value!r}" for name, value in resisting.items())
            reason = f"the recipe's wrap sets {set_by_wrap} after the constructor, whatever that was told"
            self._rows.append(MatrixRow(options.arguments, "skipped", hook=options.hook, reason=reason))
            return
        self.outcome.judge(self._module_locations)
        if is_own:
            self._said += self.outcome.notes
        row = self._judged(self.outcome, options, own=is_own)
        if row.fine and self._timing:
            row = self._timed(row, None if is_own else options)
        self._rows.append(row)

    def _begin_row(self, options: DdpOptions | None) -> bool:
        """Wrap with these options; returns from which of the two references the steps are to be taken."""
        wrapped = self._wrap(calls.matrix_phases.begin_row, options)
        synced = wrapped[0].broadcasts_buffers if self._buffers_matter else self._synced
        if synced != self._synced:
            self._kept_other(synced)
            wrapped = self._wrap(calls.matrix_phases.begin_row, options)
            self.outcome = self._references[synced].fork()
        self.outcome.wrapped = wrapped
        self._check_after_wrapping(wrapped)
        return synced

    def _go_through_steps(self, synced: bool) -> None:
        for step in range(self.asked.steps):
            self.outcome.decide_on_ddp(step)
            if self.outcome.ddp_skipped:
                return
            self._all(calls.matrix_phases.rewind, step, synced)
            words = f"{self._words}: step {step + 1} of {self.asked.steps}"
            if self._run_ddp(step, words) and not self.outcome.withheld:
                self._repeat(step)

    def _judged(self, outcome: CheckState, options: DdpOptions, *, own: bool) -> MatrixRow:
        report = outcome.report(**self._rules)
        findings = report.findings
        hidden = any(f.severity is Severity.ERROR for f in outcome.findings if f not in findings)
        errors = [finding for finding in findings if finding.severity is Severity.ERROR]
        error = outcome.against_local()
        verdict: Verdict = "right"
        if outcome.error is not None or outcome.ddp_skipped or outcome.rest_skipped:
            verdict = "stops"
        elif errors:
            verdict = "wrong"
        elif report.not_made or hidden:
            verdict = "incomplete"
        elif (options.hook or self._facts.own_hook) and (error or 0.0) > 10 * _EPS.get(self._facts.bits, 0.0):
            verdict = "lossy"
        if outcome.unfinished is not None:
            self._bug = self._bug or outcome.unfinished
            verdict, errors = "skipped", []
        said = report.error.message if report.error is not None else outcome.ddp_skipped or outcome.rest_skipped
        if verdict == "incomplete":
            why = [f"{check.name}: {check.detail}" for check in report.checks if check.name in report.not_made]
            said = " ".join([report.shortfall, *([f"({'; '.join(why)})"] if why else [])])
        said = outcome.unfinished.message if outcome.unfinished is not None else said
        if errors:
            said = errors[0].message
            if options.hook and errors[0].code == "DDP302":
                said = f"what {options.hook} rounds away is up to {error or 0.0:.2g} of a gradient: {said}"
        return MatrixRow(
            options.arguments,
            verdict,
            hook=options.hook,
            own=own,
            label="as the recipe wraps it" if own and self._facts.own is None else "",
            code=errors[0].code if errors else "",
            reason=said,
            error=error,
            findings=findings,
            failure=report.error,
        )

    # Step times

    def _timed(self, row: MatrixRow, options: DdpOptions | None) -> MatrixRow:
        """The row with its step time; the first that is right is what the others are compared with."""
        self.progress(f"{self._words}: timing steps")
        try:
            if self._baseline is not None:
                return replace(row, step_time=self._measure())
            self._all(calls.matrix_phases.keep_baseline)
            self._baseline = row.options
            self._all(calls.matrix_phases.begin_row, options)
            itself = self._measure()
            self._noise = max(abs(itself.ratio - 1), (itself.high - itself.low) / 2)
            return replace(row, baseline=True, step_time=replace(itself, ratio=1.0, low=1.0, high=1.0))
        except RankError as error:
            self._timing = False
            self._said.append(f"step times were not measured from {row.options} on: {error}")
            return row

    def _measure(self) -> StepTime:
        warm = self._pairs(_WARM_UP)
        pair = max(sum(min(both) for both in zip(*warm, strict=True)), 1e-6)
        count = min(max(int(_SECONDS_A_ROW / pair), _FEWEST_PAIRS), _MOST_PAIRS) | 1
        return step_time(self._pairs(count, expected=count * pair))

    def _pairs(self, count: int, *, expected: float = 0.0) -> list[tuple[float, float]]:
        """Seconds under baseline and row on the slowest rank, pair by pair."""
        patience = self.asked.timeout + 3 * expected
        by_rank = self.world.run(partial(calls.matrix_phases.time_steps, count), timeout=patience)
        return [(max(base for base, _ in pair), max(row for _, row in pair)) for pair in zip(*by_rank, strict=True)]


def step_time(pairs: Sequence[tuple[float, float]]) -> StepTime:
    """The median ratio of pairs (baseline, row) of seconds, with the interval that its order statistics give.

    The ends are the k-th smallest and k-th largest ratio with k from the normal approximation of the binomial
    distribution, which covers the median in about 99 of 100 cases whatever the distribution of times is (Conover,
    Practical Nonparametric Statistics, section 3.2).
    """
    ratios = sorted(row / base for base, row in pairs)
    beyond = max(math.floor(len(ratios) / 2 - 1.288 * math.sqrt(len(ratios))), 0)
    return StepTime(
        ratio=statistics.median(ratios),
        low=ratios[beyond],
        high=ratios[-1 - beyond],
        seconds=statistics.median(row for _, row in pairs),
        pairs=len(pairs),
    )
