"""The state of a check: its options, and the evidence, notes and findings so far.

`judging` turns the evidence into findings, `check_report` makes a report of it all; a check that was stopped has both.
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
from ddpcheck.judge.judge_context import group_by_step
from ddpcheck.report import calls
from ddpcheck.worlds import preloading
from ddpcheck.worlds.launchers.leader import Leader

Item = TypeVar("Item")

_NOISE_MULTIPLE = 5.0


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The options of a check; the target and the backend are known when all has been decided."""

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
    launcher: str | None = None  # who has started the processes that the ranks belong to

    def world(
        self,
        hosts: Leader | None = None,
        watch: Watch | None = None,
        *,
        make: Callable[..., World] = start_world,
        hash_seeds: bool = True,
        **more: Any,
    ) -> World:
        """A world of ranks that train, which have imported what all of them need."""
        preload = (*preloading.DDP, *calls.MODULES, *self.preload)
        asked = {"backend": self.backend, "device": self.device, "timeout": self.timeout, "preload": preload, **more}
        return make(self.world_size, **asked, hash_seeds=hash_seeds, watch=watch, hosts=hosts)

    def world_of_one(self, **more: Any) -> World:
        """A world of one process, which has no process group."""
        return replace(self, world_size=1, backend="gloo").world(process_group=False, hash_seeds=False, **more)


def bug_error(error: Exception) -> ReportError:
    """The error of a report on what should not have been raised in this process."""
    bug = as_bug(error)
    return ReportError(str(bug), EXIT_USAGE, bug.detail)


@dataclass
class CheckLog:
    """How a check went."""

    notes: list[str] = field(default_factory=list)  # sentences for the reader of the report
    # spent in each of the check's parts, which are the headings of the report
    seconds: dict[str, float] = field(default_factory=dict)
    part: str = ""  # the one under way
    error: ReportError | None = None  # the error that has ended the check
    rest_skipped: str = ""  # why the phases after the one under way were not run
    bugs: list[ReportError] = field(default_factory=list)  # of ddpcheck, after which the check has gone on
    unjudged: set[str] = field(default_factory=set)  # the parts in which a judge has raised

    def add_bug(self, bug: ReportError) -> None:
        """Note a bug of ddpcheck that has kept something from being explained or compared; the rest goes on."""
        if bug.message not in [known.message for known in self.bugs]:
            self.bugs.append(bug)

    def add_unexplained(self, what: str, answer: object) -> bool:
        """Note it where a rank answers that it could not find out `what`; returns whether it does."""
        if not isinstance(answer, NoExplanation):
            return False
        self.notes.append(f"{what}: not known, since finding out failed ({answer.reason})")
        if answer.bug:
            self.add_bug(ReportError(answer.bug, EXIT_USAGE, answer.detail))
        return True

    @property
    def unfinished(self) -> ReportError | None:
        """The bug of ddpcheck that has kept the check from a verdict, if there is one."""
        if self.error is not None and self.error.exit_code == EXIT_USAGE:
            return self.error
        return self.bugs[0] if self.unjudged else None

    def call_judge(self, part: str, judge: Callable[..., list[Any]], *args: Any, **kwargs: Any) -> list[Any]:
        """The findings of `judge`, which belongs to `part`; where it raises, that is a bug of ddpcheck."""
        try:
            return judge(*args, **kwargs)
        except Exception as error:
            self.add_bug(bug_error(error))
            self.unjudged.add(part)
            return []

    @contextlib.contextmanager
    def in_part(self, name: str) -> Iterator[None]:
        """A block of the part called `name`."""
        self.part, begun = name, time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun


@dataclass
class RankSteps:
    """Evidence of the steps that the ranks have run, without the wrapper and through it."""

    # the last step without the wrapper, by rank; of ranks that compute one model, the first
    local: Sequence[LocalStep] = ()
    first_local: Sequence[LocalStep] = ()  # the first one
    parameters: list[StepEvidence] = field(default_factory=list)  # how parameters took part, of every rank and step
    # by step, the norm of all gradients, of a rank or of the single process
    norms: dict[int, float] = field(default_factory=dict)
    ddp: list[DdpStepEvidence] = field(default_factory=list)  # the steps through the wrapper, of every rank and step
    compiled: list[CompiledStep] = field(default_factory=list)  # those through the wrapper as the recipe compiles it
    ddp_skipped: str = ""  # why no step goes through the wrapper any more
    # whether the parameters have come to differ between ranks; from then on no single process can stand for all of them
    ranks_differ: bool = False
    # whether gradients differ where parts draw other random numbers than the whole, which shows nothing
    parts_draw: bool = False
    # whether the hook leaves each rank its own gradients, and the optimizer equal parameters
    optimizer_averages: bool = False
    # parameters with zero gradients that are not zero once every parameter is moved a little
    nonzero_when_perturbed: frozenset[str] = frozenset()
    zero_ends: Mapping[str, PathEnd] = field(default_factory=dict)  # where gradients become zero, by parameter

    def add_local(self, local: Sequence[LocalStep], of_models: Sequence[LocalStep]) -> None:
        """Add a step without the wrapper, of every rank, and of one of each model."""
        self.local = of_models
        self.first_local = self.first_local or of_models
        self.parameters += [item.evidence for item in local]
        self.add_norm(local[0].evidence.step, max(item.norm for item in local))

    def add_norm(self, step: int, norm: float) -> None:
        """Add the norm of all gradients of a step, of which the largest is kept."""
        self.norms[step] = max(norm, self.norms.get(step, 0.0))

    def draws_alike(self) -> bool:
        """Whether the forward passes left torch's generator in the same state on all ranks, which were seeded apart."""
        states = {item.random.generator_state for item in self.local}
        return len(self.local) > 1 and len(states) == 1 and 0 not in states

    @property
    def apart(self) -> dict[int, list[DdpStepEvidence]]:
        """The steps through the wrapper in which ranks trained apart on purpose, of every rank."""
        return group_by_step(item for item in self.ddp if item.apart)

    def missing(self) -> dict[tuple[int, int], frozenset[str]]:
        """By step and rank, the parameters that did not contribute there."""
        return {
            (item.step, item.rank): frozenset(name for name, state in item.states.items() if state == "missing")
            for item in self.parameters
        }


@dataclass
class SingleComparison:
    """The comparison of the ranks' averaged gradients with a single process on the global batch."""

    skipped: str = ""  # why there is no single process to compare with
    hang: str = ""  # the same, where that is a hang
    incomparable: str = ""  # why a difference from it shows nothing
    backwards: int = 1  # backward passes that it makes in a step
    constants: bool = False  # whether constants stand for random numbers in some step
    differences: dict[int, tuple[Difference, ...]] = field(default_factory=dict)  # by step, from its gradients
    analysis: ShardAnalysis | None = None  # of the shards, in the step that differs and was looked at
    analysed: Sequence[LocalStep] = ()  # that step, by rank; empty where none was looked at
    # by step, the operations that chose among many at random
    choices: dict[int, tuple[str, ...]] = field(default_factory=dict)
    # by rank, the random numbers drawn for samples, where the ranks may have drawn the same
    draws: Sequence[Sequence[SharedDraw]] = ()
    program_data: Sequence[Mapping[str, str]] = ()  # by rank, plain values that the program holds, as text, by name
    changed_data: frozenset[str] = frozenset()  # names of those that the steps have changed


@dataclass
class Repeats:
    """How far a step is from itself, run again on the same rank."""

    by_rank: Sequence[RepeatedStep] = ()  # of the first step that was run again
    noise: dict[str, float] = field(default_factory=dict)  # the largest relative error so far, by parameter
    differ: bool = False  # whether it is no rounding, so that verdicts on gradients are withheld

    def add(self, by_rank: Sequence[RepeatedStep]) -> None:
        """Add a step that was run again."""
        self.by_rank = self.by_rank or by_rank
        for item in (item for repeated in by_rank for item in repeated.differences):
            self.noise[item.name] = max(item.error, self.noise.get(item.name, 0.0))

    def allowed(self, name: str, tolerance: float) -> float:
        """`tolerance` with room for the noise of a parameter (kernels that add up in no fixed order)."""
        return max(tolerance, _NOISE_MULTIPLE * self.noise.get(name, 0.0))

    def widened(self, differences: Iterable[Difference]) -> tuple[Difference, ...]:
        """The same with that room in their tolerances."""
        return tuple(replace(item, tolerance=self.allowed(item.name, item.tolerance)) for item in differences)


@dataclass
class CheckState:
    """Evidence and findings of one check, gathered phase by phase; complete or not, it makes a report."""

    asked: CheckOptions  # the options of the check
    log: CheckLog = field(default_factory=CheckLog)  # how it went
    wrapped: Sequence[WrappedModule] = ()  # the modules after wrapping, by rank
    names: Names = field(default_factory=Names)  # how to speak of parameters
    steps: RankSteps = field(default_factory=RankSteps)  # evidence of the ranks' steps
    single: SingleComparison = field(default_factory=SingleComparison)  # the comparison with the single process
    repeats: Repeats = field(default_factory=Repeats)  # the comparison of a step with itself
    # all findings so far, each with the part of the check that has made it
    found: list[tuple[str, Finding]] = field(default_factory=list)
    findings: Sequence[Finding] = ()  # the causes among them, once all has been judged
    # each of those found with its part, and the one of `findings` that tells it
    told: Sequence[tuple[str, Finding, Finding]] = ()
    modules: tuple[ModuleEntry, ...] = ()  # those of rank 0's model
    # the last collectives of the ranks, where they have failed or parted
    timelines: tuple[CollectiveTimeline, ...] = ()

    @property
    def wrapper(self) -> WrapperFacts:
        """The arguments of the wrapper; those of a plain one before there is any."""
        return self.wrapped[0].facts if self.wrapped else WrapperFacts()

    @property
    def models(self) -> list[tuple[int, ...]]:
        """The ranks that compute a model together, of each; none where each rank has its own."""
        return sorted({item.together for item in self.wrapped if item.together})

    def of_models(self, by_rank: Sequence[Item]) -> Sequence[Item]:
        """One of each model, which stands for the ranks that compute it."""
        return [by_rank[ranks[0]] for ranks in self.models] or by_rank

    def add(self, found: Sequence[Finding], part: str = "") -> None:
        """Add findings of a part, by default of the one under way."""
        self.found += ((part or self.log.part, finding) for finding in found)

    def add_comparable_steps(self, steps: Sequence[tuple[float, tuple[str, ...]]]) -> None:
        """Put the losses with comparable random numbers, and what chose among many at random, into the last step."""
        self.steps.local = [
            replace(item, loss=loss, random=replace(item.random, choices=choices))
            for item, (loss, choices) in zip(self.steps.local, self.of_models(steps), strict=True)
        ]
        step = self.steps.local[0].evidence.step
        self.single.choices[step] = tuple(dict.fromkeys(one for _, some in steps for one in some))

    def add_single(self, step: int, result: SingleStep) -> None:
        """Add a step of the single process."""
        self.single.backwards = result.backwards
        self.steps.add_norm(step, result.norm)
        if result.float64_error and not any("float64" in note for note in self.log.notes):
            self.log.notes.append(f"no float64 run to measure rounding with: {result.float64_error}")

    def add_analysis(self, step: int, analysis: ShardAnalysis) -> bool:
        """Add the analysis of a step that differs; returns whether it still does, rounding aside."""
        single = self.single
        single.differences[step] = tuple(
            replace(item, tolerance=max(item.tolerance, item.error)) if item.name in analysis.rounded else item
            for item in single.differences[step]
        )
        differs = any(item.bad for item in single.differences[step])
        if differs:  # else the next step that differs is looked at
            single.analysis, single.analysed = analysis, self.steps.local
        return differs

    @property
    def wants_analysis(self) -> bool:
        """Whether the step that differs is to be looked at: the first one, or one after it that chose nothing."""
        single = self.single
        return single.analysis is None or (
            bool(single.choices.get(single.analysed[0].evidence.step)) and not self.steps.local[0].random.choices
        )

    def differs(self, step: int) -> bool:
        """Whether the ranks' average of a step differs from the global batch by more than the step from itself."""
        return any(difference.bad for difference in self.repeats.widened(self.single.differences[step]))

    @property
    def replicas_stay_equal(self) -> bool:
        """Whether the parameters have moved, and were the same on all ranks after each step through the wrapper."""
        moved = any(item.parameters != self.wrapped[item.rank].parameters for item in self.steps.ddp)
        return moved and not self.steps.ranks_differ

    def take_single_process(self, reference: CheckState) -> None:
        """Compare with the single process of a finished check of the same target."""
        self.single = replace(reference.single, incomparable="")
        self.repeats.by_rank = self.repeats.by_rank or reference.repeats.by_rank
        self.repeats.noise = {**reference.repeats.noise, **self.repeats.noise}
        for step, norm in reference.steps.norms.items():
            self.steps.add_norm(step, norm)

    @property
    def stopped_by_target(self) -> bool:
        """Whether the check was ended by something that does not depend on the wrapper's options."""
        by_options = self.log.part == "reducer" or self.log.rest_skipped.startswith("DDP221")
        return bool(self.single.hang) or (bool(self.log.error or self.log.rest_skipped) and not by_options)
