"""State of a check: options, evidence, notes and findings so far.

`judging` turns the evidence into findings, `check_report` builds the report, also after an early stop.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ddpcheck.findings.errors import EXIT_USAGE
from ddpcheck.findings.evidence.gradients import Difference, RepeatedStep, ShardAnalysis, SingleStep
from ddpcheck.findings.evidence.modules import WrappedModule, WrapperFacts
from ddpcheck.findings.evidence.steps import (
    CompiledStep,
    DdpStepEvidence,
    LocalStep,
    NoExplanation,
    PathEnd,
    SharedDraw,
    StepEvidence,
)
from ddpcheck.findings.figures import CollectiveTimeline, ModuleEntry
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Report, ReportError
from ddpcheck.findings.selection import Suppression
from ddpcheck.findings.tracebacks import as_bug
from ddpcheck.findings.wording import Names
from ddpcheck.harness import Watch, World, start_world
from ddpcheck.report import calls
from ddpcheck.rules.replicas.ddp221_wrapper_options import STOPPED
from ddpcheck.trace.check_context import group_by_step
from ddpcheck.trace.rank_params import RankParams
from ddpcheck.trace.replicas import differing_names
from ddpcheck.worlds import rank_setup
from ddpcheck.worlds.launchers.leader import Leader

Item = TypeVar("Item")
Values = TypeVar("Values", WrappedModule, DdpStepEvidence)

_NOISE_MULTIPLE = 5.0


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Options of a check; `resolve_options` sets the target and the backend."""

    target: str = ""
    world_size: int = 2
    backend: str = ""
    device: str = "cpu"
    steps: int = 3
    seed: int = 0
    timeout: float = 30.0
    preload: Sequence[str] = ()
    select: Sequence[str] = ()
    ignore: Sequence[str] = ()
    suppress: Sequence[Suppression] = ()
    baseline: Report | None = None
    launcher: str | None = None  # launcher of the rank processes; None without a launcher
    rank_parameters: Sequence[str] = ()  # patterns for names of parameters that are each rank's own

    def world(
        self,
        hosts: Leader | None = None,
        watch: Watch | None = None,
        *,
        make: Callable[..., World] = start_world,
        hash_seeds: bool = True,
        **more: Any,
    ) -> World:
        """Start a world of training ranks with the required modules preloaded."""
        preload = (*rank_setup.DDP_MODULES, *calls.MODULES, *self.preload)
        options = {"backend": self.backend, "device": self.device, "timeout": self.timeout, "preload": preload, **more}
        return make(self.world_size, **options, hash_seeds=hash_seeds, watch=watch, hosts=hosts)

    def single_process_world(self, **more: Any) -> World:
        """Start a world of one process without a process group."""
        return replace(self, world_size=1, backend="gloo").world(process_group=False, hash_seeds=False, **more)


def bug_error(error: Exception) -> ReportError:
    """Return an unexpected exception in this process as a `ReportError`: a bug of ddpcheck."""
    bug = as_bug(error)
    return ReportError(str(bug), EXIT_USAGE, bug.detail)


@dataclass
class CheckLog:
    """Progress and errors of a check."""

    notes: list[str] = field(default_factory=list)  # sentences for the reader of the report
    # seconds by part of the check (heading of the report)
    seconds: dict[str, float] = field(default_factory=dict)
    part: str = ""  # part in progress
    error: ReportError | None = None  # error that ended the check
    rest_skipped: str = ""  # why the later phases were not run
    bugs: list[ReportError] = field(default_factory=list)  # bugs of ddpcheck that did not stop the check
    unjudged: set[str] = field(default_factory=set)  # parts in which a judge raised

    def add_bug(self, bug: ReportError) -> None:
        """Note a bug of ddpcheck that prevented an explanation or comparison."""
        if bug.message not in [known.message for known in self.bugs]:
            self.bugs.append(bug)

    def add_unexplained(self, what: str, answer: object) -> bool:
        """If `answer` is a `NoExplanation`, note that `what` is unknown and return True."""
        if not isinstance(answer, NoExplanation):
            return False
        self.notes.append(f"{what}: not known, since finding out failed ({answer.reason})")
        if answer.bug:
            self.add_bug(ReportError(answer.bug, EXIT_USAGE, answer.detail))
        return True

    @property
    def unfinished(self) -> ReportError | None:
        """Bug of ddpcheck that prevented a verdict, if any."""
        if self.error is not None and self.error.exit_code == EXIT_USAGE:
            return self.error
        return self.bugs[0] if self.unjudged else None

    def call_judge(self, part: str, judge: Callable[..., list[Any]], *args: Any, **kwargs: Any) -> list[Any]:
        """Return the findings of `judge`; if it raises, note a bug in `part`."""
        try:
            return judge(*args, **kwargs)
        except Exception as error:
            self.add_bug(bug_error(error))
            self.unjudged.add(part)
            return []

    @contextlib.contextmanager
    def time_part(self, name: str) -> Iterator[None]:
        """Add the duration of a block to part `name`."""
        self.part, start = name, time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass
class RankSteps:
    """Evidence of the ranks' steps, without and through the wrapper."""

    # last step without the wrapper, by rank (first rank of each model)
    local: Sequence[LocalStep] = ()
    first_local: Sequence[LocalStep] = ()  # first step without the wrapper
    parameters: list[StepEvidence] = field(default_factory=list)  # use of parameters, of every rank and step
    # norm of all gradients by step, the largest of ranks and single process
    norms: dict[int, float] = field(default_factory=dict)
    ddp: list[DdpStepEvidence] = field(default_factory=list)  # steps through the wrapper, of every rank and step
    compiled: list[CompiledStep] = field(default_factory=list)  # steps through the compiled wrapper
    ddp_skipped: str = ""  # why the wrapper is no longer used
    # True once parameters differ between ranks: no single process can represent the ranks from then on
    ranks_differ: bool = False
    # True if gradients differ because parts draw other random numbers than the whole, which proves nothing
    parts_draw: bool = False
    # True if the hook leaves local gradients, and the optimizer averages the parameters
    optimizer_averages: bool = False
    # parameters with zero gradients that become nonzero if all parameters are perturbed
    nonzero_when_perturbed: frozenset[str] = frozenset()
    zero_ends: Mapping[str, PathEnd] = field(default_factory=dict)  # where gradients become zero, by parameter

    def add_local(self, local: Sequence[LocalStep], per_model: Sequence[LocalStep]) -> None:
        """Add all ranks' steps without the wrapper, and the steps selected by `CheckState.per_model`."""
        self.local = per_model
        self.first_local = self.first_local or per_model
        self.parameters += [item.evidence for item in local]
        self.add_norm(local[0].evidence.step, max(item.norm for item in local))

    def add_norm(self, step: int, norm: float) -> None:
        """Add a step's norm of all gradients; keep the largest norm of the step."""
        self.norms[step] = max(norm, self.norms.get(step, 0.0))

    def generators_equal(self) -> bool:
        """Return True if differently seeded generators are equal on all ranks after forward."""
        states = {item.random.generator_state for item in self.local}
        return len(self.local) > 1 and len(states) == 1 and 0 not in states

    @property
    def local_sgd_steps(self) -> dict[int, list[DdpStepEvidence]]:
        """Steps through the wrapper in which ranks trained independently (post-local SGD), by step."""
        return group_by_step(item for item in self.ddp if item.is_local_sgd)

    def missing(self) -> dict[tuple[int, int], frozenset[str]]:
        """Return the parameters missing from the loss, by step and rank."""
        return {
            (item.step, item.rank): frozenset(name for name, state in item.states.items() if state == "missing")
            for item in self.parameters
        }


@dataclass
class SingleComparison:
    """Comparison of the ranks' averaged gradients with a single process."""

    skipped: str = ""  # why there is no single process
    hang: str = ""  # hang of the single process
    incomparable: str = ""  # why a difference is inconclusive
    backwards: int = 1  # backward passes of the single process per step
    constants: bool = False  # True if constants replaced random numbers in some step
    differences: dict[int, tuple[Difference, ...]] = field(default_factory=dict)  # gradient differences by step
    analysis: ShardAnalysis | None = None  # shards of the analysed step
    analysed: Sequence[LocalStep] = ()  # local steps of the analysed step, by rank
    # operations that chose among many at random, by step
    choices: dict[int, tuple[str, ...]] = field(default_factory=dict)
    # random numbers drawn for samples, by rank, if ranks may have drawn the same
    draws: Sequence[Sequence[SharedDraw]] = ()
    program_data: Sequence[Mapping[str, str]] = ()  # plain values of the program as text, by rank and name
    changed_data: frozenset[str] = frozenset()  # names of values that the steps changed


@dataclass
class Repeats:
    """Differences of a step repeated on the same rank, from nondeterministic kernels."""

    by_rank: Sequence[RepeatedStep] = ()  # first repeated step
    noise: dict[str, float] = field(default_factory=dict)  # largest relative error so far, by parameter
    differ: bool = False  # True if more than rounding: gradient verdicts are withheld

    def add(self, by_rank: Sequence[RepeatedStep]) -> None:
        self.by_rank = self.by_rank or by_rank
        for item in (item for repeated in by_rank for item in repeated.differences):
            self.noise[item.name] = max(item.error, self.noise.get(item.name, 0.0))

    def allowed(self, name: str, tolerance: float) -> float:
        """Return the larger of `tolerance` and a multiple of the parameter's noise."""
        return max(tolerance, _NOISE_MULTIPLE * self.noise.get(name, 0.0))

    def widened(self, differences: Iterable[Difference]) -> tuple[Difference, ...]:
        """Return `differences`, with tolerances raised to a multiple of each parameter's noise."""
        return tuple(replace(item, tolerance=self.allowed(item.name, item.tolerance)) for item in differences)


@dataclass
class CheckState:
    """Evidence and findings of one check, complete or not."""

    asked: CheckOptions  # options of the check
    rank_params: RankParams = field(default_factory=RankParams)  # parameters that are not compared
    log: CheckLog = field(default_factory=CheckLog)  # progress and errors
    wrapped: Sequence[WrappedModule] = ()  # modules after wrapping, by rank
    names: Names = field(default_factory=Names)  # display names of parameters
    steps: RankSteps = field(default_factory=RankSteps)  # evidence of the ranks' steps
    single: SingleComparison = field(default_factory=SingleComparison)  # comparison with the single process
    repeats: Repeats = field(default_factory=Repeats)  # comparison of a step with its repetition
    # all findings so far, with the part that made them
    part_findings: list[tuple[str, Finding]] = field(default_factory=list)
    findings: Sequence[Finding] = ()  # root causes, after judging
    # (part, finding, root cause in `findings`)
    reported: Sequence[tuple[str, Finding, Finding]] = ()
    modules: tuple[ModuleEntry, ...] = ()  # modules of rank 0's model
    # last collectives of the ranks, after a failure or mismatch
    timelines: tuple[CollectiveTimeline, ...] = ()

    @property
    def wrapper(self) -> WrapperFacts:
        """Arguments of the wrapper; defaults before wrapping."""
        return self.wrapped[0].facts if self.wrapped else WrapperFacts()

    @property
    def models(self) -> list[tuple[int, ...]]:
        """Groups of ranks that share a split model; empty if no model is split."""
        return sorted({item.together for item in self.wrapped if item.together})

    def per_model(self, by_rank: Sequence[Item]) -> Sequence[Item]:
        """Return the item of each split model's first rank; without split models, return `by_rank`."""
        return [by_rank[ranks[0]] for ranks in self.models] or by_rank

    def without_rank_params(self, ranks: Sequence[Values]) -> Sequence[Values]:
        """Return evidence without `rank_parameters`; set `ranks_differ` if `rank_parameters` differ."""
        if not self.rank_params.patterns:
            return ranks
        kept = [self.rank_params.without(item) for item in ranks]
        left_out = [{n: v for n, v in item.parameters.items() if self.rank_params.has(n)} for item in ranks]
        self.steps.ranks_differ |= bool(differing_names(left_out))
        return kept

    def add(self, findings: Sequence[Finding], part: str = "") -> None:
        """Add findings of a part of the check, by default of the current part."""
        self.part_findings += ((part or self.log.part, finding) for finding in findings)

    def keep(self, is_kept: Callable[[Finding], bool]) -> None:
        """Keep only the findings for which `is_kept` is true."""
        self.part_findings = [(part, finding) for part, finding in self.part_findings if is_kept(finding)]

    def add_comparable_steps(self, steps: Sequence[tuple[float, tuple[str, ...]]]) -> None:
        """Overwrite losses and random choices with values from a repetition with given random numbers."""
        self.steps.local = [
            replace(item, loss=loss, random=replace(item.random, choices=choices))
            for item, (loss, choices) in zip(self.steps.local, self.per_model(steps), strict=True)
        ]
        step = self.steps.local[0].evidence.step
        self.single.choices[step] = tuple(dict.fromkeys(choice for _, choices in steps for choice in choices))

    def add_single(self, step: int, result: SingleStep) -> None:
        self.single.backwards = result.backwards
        self.steps.add_norm(step, result.norm)
        if result.float64_error and not any("float64" in note for note in self.log.notes):
            self.log.notes.append(f"no float64 run to measure rounding with: {result.float64_error}")

    def add_analysis(self, step: int, analysis: ShardAnalysis) -> bool:
        """Add the analysis of a differing step; return True unless rounding explains the difference."""
        single = self.single
        single.differences[step] = tuple(
            replace(item, tolerance=max(item.tolerance, item.error)) if item.name in analysis.rounded else item
            for item in single.differences[step]
        )
        differs = any(item.bad for item in single.differences[step])
        if differs:  # otherwise the next differing step is analysed
            single.analysis, single.analysed = analysis, self.steps.local
        return differs

    @property
    def wants_analysis(self) -> bool:
        """Return True if the shards of the current, differing step should be analysed.

        The first differing step is analysed. If operations of that step chose among many at random, a later step
        without such operations is analysed, too.
        """
        single = self.single
        return single.analysis is None or (
            bool(single.choices.get(single.analysed[0].evidence.step)) and not self.steps.local[0].random.choices
        )

    def differs(self, step: int) -> bool:
        """Return True if the average and the global batch differ beyond noise."""
        return any(difference.bad for difference in self.repeats.widened(self.single.differences[step]))

    @property
    def replicas_stay_equal(self) -> bool:
        """Return True if parameters changed and stayed equal on all ranks."""
        changed = any(item.parameters != self.wrapped[item.rank].parameters for item in self.steps.ddp)
        return changed and not self.steps.ranks_differ

    def reuse_single_process(self, reference: CheckState) -> None:
        """Copy the single-process results of a finished check of the same target."""
        self.single = replace(reference.single, incomparable="")
        self.repeats.by_rank = self.repeats.by_rank or reference.repeats.by_rank
        self.repeats.noise = {**reference.repeats.noise, **self.repeats.noise}
        for step, norm in reference.steps.norms.items():
            self.steps.add_norm(step, norm)

    @property
    def stopped_by_target(self) -> bool:
        """Return True if the target, not the wrapper's options, stopped the check."""
        by_options = self.log.part == "reducer" or self.log.rest_skipped == STOPPED
        return bool(self.single.hang) or (bool(self.log.error or self.log.rest_skipped) and not by_options)
