"""`check_matrix(recipe)`: check a model under one combination of DDP options after another.

A row is a check with one combination of options. The single process does not depend on the options and is run once.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ddpcheck.extras import calls
from ddpcheck.extras.matrix.advice import advise
from ddpcheck.extras.matrix.option_sets import (
    BACKEND,
    MICRO_BATCHES,
    ModelFacts,
    OptionSet,
    VariantFacts,
    VariantStep,
    WrappedRow,
    first_option_sets,
    further_option_sets,
)
from ddpcheck.findings.errors import EXIT_HANG, RankError, TargetError
from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.modules import WrappedModule
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import ReportError, Severity
from ddpcheck.findings.selection import Suppression
from ddpcheck.findings.wording import plural, suggests_names
from ddpcheck.harness import World
from ddpcheck.report.checking.check import resolve_options
from ddpcheck.report.checking.check_report import report_of
from ddpcheck.report.checking.check_run import CheckRun
from ddpcheck.report.checking.check_state import CheckOptions, CheckState
from ddpcheck.report.matrix.matrix import Matrix, MatrixRow, StepTime, Verdict
from ddpcheck.report.matrix.option_sets import DEFAULTS, DDPOptions
from ddpcheck.rules.gradients.ddp301_not_synchronised import judge_variant_gradients
from ddpcheck.rules.gradients.ddp302_reducer_mismatch import describe_rounding, whole_batch_mismatch
from ddpcheck.rules.loss.ddp514_accumulation_scale import micro_batch_mismatch
from ddpcheck.worlds.launchers.leader import Leader

if TYPE_CHECKING:
    from ddpcheck.recipe.recipe import Recipe

_BROADCASTS = ("broadcast_buffers", "forward_sync_buffers")
_WARM_UP = 2
_FEWEST_PAIRS, _MOST_PAIRS = 5, 101
_SECONDS_A_ROW = 1.0
_EPS = {64: 2.3e-16, 32: 1.2e-7, 16: 7.9e-3}  # machine epsilon by gradient bits; for 16, of bfloat16
COMPILED = f'torch.compile(backend="{BACKEND}")'
UNSYNCED = f"{MICRO_BATCHES} micro-batches, no_sync in the first"
SYNCED = f"{MICRO_BATCHES} micro-batches, each synchronised"
_LONGEST_COMPILATION = 60.0  # seconds; the timeout of the world itself is much longer


@suggests_names("check_matrix")
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
    suppress: Sequence[Suppression] = (),
    rank_parameters: Sequence[str] = (),
    step_times: bool = True,
    progress: Callable[[str], None] | None = None,
    hosts: Leader | None = None,
) -> Matrix:
    """Run a recipe under useful combinations of options of the installed `DistributedDataParallel`.

    In a recipe that makes its own wrapper, the options replace the arguments of the recipe's `DistributedDataParallel`
    call.

    Args:
        target: A `Recipe`, or a TARGET ("path/to/file.py:attr") that is loaded on the ranks only.
        world_size: Number of ranks.
        backend: "gloo" or "nccl"; default: nccl if every rank has its own GPU, else gloo.
        device: "cpu" or "cuda".
        steps: Training steps to run in each row.
        timeout: Seconds before one phase of a row counts as a hang, which stops only that row.
        seed: Seed of all random number generators.
        preload: Modules imported once, before ranks are forked; see `World`.
        select: Codes, prefixes or names of the rules that may decide a verdict; default: all.
        ignore: Codes, prefixes or names of the rules that may not decide a verdict.
        suppress: Findings that may not decide a verdict, with a reason.
        rank_parameters: See `ddpcheck.check`.
        step_times: If True, measure the step time of each row that is right.
        progress: Called with a short text at the start of each phase.
        hosts: See `ddpcheck.check`.

    Returns:
        The matrix. `Matrix.error` is set if the target fails or hangs regardless of the options.

    Raises:
        UsageError: An argument is invalid, or `target` names no recipe.
    """
    modules = (*calls.MODULES, *preload)
    limits = world_size, backend or "", device, steps, seed, timeout
    options = CheckOptions("", *limits, modules, select, ignore, suppress, rank_parameters=rank_parameters)
    asked = resolve_options(options, target, hosts)
    return _MatrixRun(target, asked, progress or (lambda _text: None), hosts).run(step_times=step_times)


@dataclass
class _MatrixRun:
    target: Recipe | str
    asked: CheckOptions
    progress: Callable[[str], None]
    hosts: Leader | None
    references: list[CheckState] = field(default_factory=list)  # at most two, with and without broadcast buffers
    facts: ModelFacts = field(default_factory=ModelFacts)
    noise: float | None = None
    rows: list[MatrixRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bug: ReportError | None = None  # bug of ddpcheck in a row

    def run(self, *, step_times: bool) -> Matrix:
        """Check all rows, even after a failure; if `step_times`, also time correct rows."""
        start = time.perf_counter()
        own = state = self._check(None, "the recipe's own options")
        if not own.stopped_by_target and not own.wrapped:  # no wrapper can be made with the recipe's own options
            state = self._check(DEFAULTS, "defaults")
        wrapped = [item for item in state.wrapped if isinstance(item, WrappedRow)]
        if state.stopped_by_target or not wrapped:
            self.rows = [self._judge(own, DEFAULTS, own=True)]
        else:
            first = wrapped[0].model
            self.facts = replace(
                first,
                own=first.own if all(item.model.own == first.own for item in wrapped) else None,
                buffers_differ=any(item.buffers != wrapped[0].buffers for item in wrapped),
                absent=next(iter(self.references), own).steps.missing(),
            )
            set_options = {**(self.facts.own or {}), **wrapped[0].set_by_wrap}
            for name, value in list(set_options.items()):
                if value is not False if name in _BROADCASTS else value in (None, False):  # torch's default
                    del set_options[name]
            self.rows = [self._judge(own, DDPOptions(set_options), own=True)]
            if wrapped[0].facts.is_ddp:
                self._try_options()
                if not wrapped[0].together:  # sharding would make a different model
                    self._try_shards()
                    self._try_variants()
            if step_times and wrapped[0].together:
                self.notes.append("step times are not measured of a model that tensor parallelism splits")
            elif step_times:
                self._measure_rows()
        report = report_of(own)
        return Matrix(
            target=report.target,
            rows=tuple(self.rows),
            advice=advise(self.rows, noise=self.noise),
            environment=report.environment,
            world={**report.world, "notes": list(dict.fromkeys([*own.log.notes, *self.notes]))},
            noise=self.noise,
            timing={**report.timing, "total": round(time.perf_counter() - start, 4)},
            error=(own.log.error if state.stopped_by_target else None) or self.bug or next(iter(own.log.bugs), None),
            tool=report.tool,
        )

    # Rows

    def _check(
        self, options: DDPOptions | None, words: str, wrap: Callable[[], WrappedModule] | None = None
    ) -> CheckState:
        """Check the recipe, wrapped with `options` (None: as in the recipe) or by `wrap`.

        Later checks reuse the single-process results of the first finished check, except if only one of the two checks
        broadcasts buffers: then the steps of the ranks start from different buffers.
        """
        synced = options is None or not {False} & {options.arguments.get(name) for name in _BROADCASTS}
        wrapped = [(ref.wrapped[0], ref) for ref in self.references]
        usable = (ref for item, ref in wrapped if not item.buffers or item.broadcasts_buffers == synced)
        reference = next(usable, None)
        state = CheckRun(
            self.target,
            self.asked,
            progress=lambda phase: self.progress(f"{words}: {phase}"),
            hosts=self.hosts,
            wrap=wrap or partial(calls.matrix_phases.wrap, options),
            reference=reference,
        ).run()
        stopped = state.log.error is not None or state.log.rest_skipped
        if not (reference or stopped or state.repeats.differ or state.steps.ranks_differ):
            self.references.append(state)
        return state

    def _try_options(self) -> None:
        own_row, rows = self.rows[0], self.rows
        first = first_option_sets(self.facts)
        queue = [options for options in first if own_row.label or options != own_row.options]
        expected = 1 + len(queue) + len(further_option_sets(self.facts, DEFAULTS, []))
        for options in queue:
            rows.append(self._run_row(OptionSet(options), expected))
        right = [row.options for row in rows if row.fine and not row.label]
        if not right and any(row.failure is not None and row.failure.exit_code == EXIT_HANG for row in rows):
            self.notes.append(
                "no further options were tried: nothing is right so far, and each row that hangs takes "
                f"{self.asked.timeout:g} s"
            )
            return
        base = next((options for options in first if options in right), next(iter(right), DEFAULTS))
        graphs = [options for options in first if options in right and options != DEFAULTS]
        for option_set in further_option_sets(self.facts, base, graphs):
            if own_row.label or option_set.options != own_row.options:
                rows.append(self._run_row(option_set, expected))

    def _try_shards(self) -> None:
        size = self.asked.world_size
        if not self.facts.shards or size < 2 or not any(row.fine for row in self.rows):
            return
        for shape in [(size,), *([(2, size // 2)] if size > 3 and size % 2 == 0 else [])]:
            label = "fully_shard" if len(shape) == 1 else f"fully_shard, 2 replicas of {plural(size // 2, 'shard')}"
            nearest = DEFAULTS.plus(broadcast_buffers=False)
            state = self._check(nearest, label, partial(calls.matrix_phases.wrap_in_shards, shape))
            self.rows.append(replace(self._judge(state, DEFAULTS, own=False), label=label))

    def _try_variants(self) -> None:
        """Try compiled and micro-batched steps with the options of the first correct row."""
        fine = [row for row in self.rows if row.fine and not row.hook and (row.own or not row.label)]
        if fine and not self.facts.own_hook:
            self.rows += variant_rows(self.target, self.asked, fine[0], self.progress, self.hosts)

    def _run_row(self, option_set: OptionSet, expected: int) -> MatrixRow:
        """Check the recipe with an option set, unless skipped, and return the row."""
        options = option_set.options
        row = partial(MatrixRow, options.arguments, hook=options.hook)
        if option_set.skip_reason:
            return row("skipped", reason=option_set.skip_reason)
        for finding in option_set.unsafe:
            return row("stops", code=finding.code, reason=finding.message)
        state = self._check(options, f"options {len(self.rows) + 1} of about {expected}: {options}")
        set_by_wrap = next((item.set_by_wrap for item in state.wrapped if isinstance(item, WrappedRow)), {})
        if set_by_wrap:
            values = ", ".join(f"{name}={value!r}" for name, value in set_by_wrap.items())
            reason = f"the recipe's wrap sets {values} after the constructor, whatever its arguments"
            return row("skipped", reason=reason)
        return self._judge(state, options, own=False)

    def _judge(self, state: CheckState, options: DDPOptions, *, own: bool) -> MatrixRow:
        report = report_of(state)
        findings = report.findings
        hidden = any(finding.severity is Severity.ERROR for finding in state.findings if finding not in findings)
        errors = [finding for finding in findings if finding.severity is Severity.ERROR]
        error = max((diff.error for item in state.steps.ddp for diff in item.against_local), default=None)
        verdict: Verdict = "right"
        text = report.error.message if report.error is not None else state.steps.ddp_skipped or state.log.rest_skipped
        if state.log.unfinished is not None:
            self.bug = self.bug or state.log.unfinished
            verdict, errors, text = "skipped", [], state.log.unfinished.message
        elif state.log.error is not None or state.steps.ddp_skipped or state.log.rest_skipped:
            verdict = "stops"
        elif errors:
            verdict = "wrong"
        elif report.not_made or hidden:
            verdict = "incomplete"
            why = "; ".join(f"{check.name}: {check.detail}" for check in report.checks if check.name in report.not_made)
            text = f"{report.shortfall} ({why})" if why else report.shortfall
        elif (options.hook or self.facts.own_hook) and (error or 0.0) > 10 * _EPS.get(self.facts.bits, 0.0):
            verdict = "lossy"
        if errors:
            text = describe_rounding(errors[0], options.hook, error or 0.0) if options.hook else errors[0].message
        return MatrixRow(
            options.arguments,
            verdict,
            hook=options.hook,
            own=own,
            label="as the recipe wraps it" if own and self.facts.own is None else "",
            code=errors[0].code if errors else "",
            reason=text,
            error=error,
            findings=findings,
            failure=report.error,
        )

    # Step times

    def _measure_rows(self) -> None:
        fine = [row for row in self.rows if row.fine and (row.own or not row.label)]
        baseline = next((row for row in fine if not row.label and row.options == DEFAULTS), fine[0] if fine else None)
        if baseline is None:
            return
        for row in (baseline, *(row for row in fine if row is not baseline)):
            index = self.rows.index(row)
            self.progress(f"options {index + 1} of {len(self.rows)}: {row.options}: timing steps")
            try:
                measured = self._measure(baseline, row)
            except RankError as error:
                self.notes.append(f"step times were not measured from {row.options} on: {error}")
                return
            if row is baseline:
                self.noise = max(abs(measured.ratio - 1), (measured.high - measured.low) / 2)
                measured = replace(measured, ratio=1.0, low=1.0, high=1.0)
            self.rows[index] = replace(row, baseline=row is baseline, step_time=measured)

    def _measure(self, baseline: MatrixRow, row: MatrixRow) -> StepTime:
        asked = self.asked
        with asked.world(self.hosts) as world:

            def pairs(count: int, *, expected: float = 0.0) -> list[tuple[float, float]]:
                """Time `count` pairs of steps; return (baseline, row) seconds of the slowest rank."""
                patience = asked.timeout + 3 * expected
                by_rank = world.run(partial(calls.matrix_phases.time_steps, count), timeout=patience)
                return [tuple(map(max, zip(*pair, strict=True))) for pair in zip(*by_rank, strict=True)]

            options = [None if each.own else each.options for each in (baseline, row)]
            world.run(partial(calls.matrix_phases.prepare_timing, self.target, asked.seed, asked.steps, options))
            pair = max(sum(min(seconds) for seconds in zip(*pairs(_WARM_UP), strict=True)), 1e-6)
            count = min(max(int(_SECONDS_A_ROW / pair), _FEWEST_PAIRS), _MOST_PAIRS) | 1
            return step_time(pairs(count, expected=count * pair))


def step_time(pairs: Sequence[tuple[float, float]]) -> StepTime:
    """Return the median ratio of (baseline, row) seconds, and its confidence interval.

    The ends are the k-th smallest and k-th largest ratio with k from the normal approximation of the binomial
    distribution, which covers the median in about 99 of 100 cases for any distribution of times (Conover, Practical
    Nonparametric Statistics, section 3.2).
    """
    ratios = sorted(row / base for base, row in pairs)
    k = max(math.floor(len(ratios) / 2 - 1.288 * math.sqrt(len(ratios))), 0)
    return StepTime(
        ratio=statistics.median(ratios),
        low=ratios[k],
        high=ratios[-1 - k],
        seconds=statistics.median(row for _, row in pairs),
        pairs=len(pairs),
    )


def variant_rows(
    target: Recipe | str, asked: CheckOptions, base: MatrixRow, progress: Callable[[str], None], hosts: Leader | None
) -> Iterator[MatrixRow]:
    """Yield a row for each compiled or micro-batched step; restart ranks after a failure."""
    options = None if base.own else base.options
    steps: dict[str, Callable[[], VariantStep]] = {
        UNSYNCED: partial(calls.matrix_phases.accumulated_step, False),
        SYNCED: partial(calls.matrix_phases.accumulated_step, True),
        COMPILED: calls.matrix_phases.compiled_step,
    }
    world: World | None = None
    facts: list[VariantFacts] = []
    deadline = math.inf  # deadline of the current compilation

    def watch(_world: World, _finished: frozenset[int], _running: frozenset[int]) -> str | None:
        return "{ranks} did not finish to compile in time" if time.monotonic() > deadline else None

    with contextlib.ExitStack() as worlds:
        for title, step in steps.items():
            label = title if base.options == DEFAULTS else f"{base.options}, {title}"
            progress(label)
            row = partial(MatrixRow, base.arguments, hook=base.hook, label=label)
            deadline = math.inf
            try:
                if world is None:  # first variant, or previous variant failed
                    world = worlds.enter_context(asked.world(hosts, watch))
                    facts = world.run(partial(calls.matrix_phases.prepare, target, asked.seed, options))
                reasons = (entry.not_compiled if title == COMPILED else entry.not_split for entry in facts)
                if reason := next(filter(None, reasons), ""):
                    yield row("skipped", reason=reason)
                elif title != COMPILED and (worst := _worst_bad([entry.differences for entry in facts])):
                    finding = micro_batch_mismatch(worst, MICRO_BATCHES)
                    yield row("wrong", code=finding.code, reason=finding.message)
                else:
                    deadline = time.monotonic() + _LONGEST_COMPILATION if title == COMPILED else math.inf
                    yield _judge_step(world.run(step), row)
            except (RankError, TargetError) as error:
                text = f"to compile it takes more than {_LONGEST_COMPILATION:g} s"
                yield row("skipped", reason=text) if time.monotonic() > deadline else row("stops", reason=str(error))
                worlds.close()
                world = None


def _judge_step(steps: Sequence[VariantStep], row: Callable[..., MatrixRow]) -> MatrixRow:
    if any(step.graphs == 0 for step in steps):
        return row("incomplete", reason="torch.compile has compiled nothing of it")
    for finding in judge_variant_gradients([step.gradients for step in steps]):
        return row("wrong", code=finding.code, reason=finding.message)
    error = max((difference.error for step in steps for difference in step.differences), default=None)
    worst = _worst_bad([step.differences for step in steps])
    if worst is None:
        return row("right", error=error)
    if any(step.drew for step in steps):
        return row("incomplete", reason="its random numbers differ in micro-batches, so its gradients are not compared")
    finding = whole_batch_mismatch(worst)
    return row("wrong", code=finding.code, reason=finding.message, error=error)


def _worst_bad(differences: Sequence[Sequence[Difference]]) -> Difference | None:
    bad = [difference for items in differences for difference in items if difference.bad]
    return max(bad, key=lambda difference: difference.error, default=None)
