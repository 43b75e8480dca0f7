"""Steps, state and schedules of optimizers, by rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from ddpcheck.findings.evidence.script import MetricUsed, OptimizerStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import format_ranks, join_names, plural
from ddpcheck.trace.script_facts import ScriptFacts, WrapperTrace, first_steps
from ddpcheck.trace.unwrapped_params import Steps, any_gradient_differs, are_local, names_differing
from ddpcheck.trace.view import NotRecorded, ScriptView, View

LOAD_EVERYWHERE = "Load the optimizer's state on every rank, from the same file, or begin with the same one on each."


def restored_on_some(rank_steps: Steps) -> dict[int, Location]:
    """Map ranks that loaded optimizer state to the loading line; {} if all did."""
    restored = {rank: step.restored_at for rank, step in enumerate(rank_steps) if step.restored_at is not None}
    return restored if len(restored) < len(rank_steps) else {}


def describe_loads(restored: Iterable[int]) -> str:
    return f"load_state_dict is called there, on {format_ranks(restored)} only"


def locate_options(finding: Finding, rank_steps: Steps, line: Location | None) -> Finding:
    """Locate a finding on options that differ between ranks, and add known causes.

    The location is the `load_state_dict` call if only some ranks make it, else `line`, else the optimizer step.
    """
    first, restored = rank_steps[0], restored_on_some(rank_steps)
    finding = replace(finding, steps=(first.count,), location=first.location)
    if restored:
        line, evidence = next(iter(restored.values())), (*finding.evidence, describe_loads(restored))
        finding = replace(finding, ranks=tuple(restored), evidence=evidence, fix=LOAD_EVERYWHERE)
    return finding.relocated(line, "optimizer steps")


@dataclass(frozen=True, slots=True)
class OptimizerStates(ScriptView):
    """State of optimizers before their steps, and the files that the ranks load."""

    checks = ("optimizers",)


@dataclass(frozen=True, slots=True)
class Optimizers(ScriptView):
    """Options, numbers of steps, gradients and schedules of optimizers."""

    checks = ("optimizers",)

    @property
    def first_steps(self) -> list[Steps]:
        """First step of each optimizer on each rank; raises `NotRecorded` if optimizer counts differ."""
        firsts = [first_steps(rank) for rank in self.facts.ranks]
        if len({len(steps) for steps in firsts}) > 1:
            numbers = join_names([str(len(steps)) for steps in firsts])
            raise NotRecorded(f"options are not compared: {numbers} optimizers have stepped on the ranks")
        return list(zip(*firsts, strict=True))

    def compared(self, check: str, findings: Sequence[Finding]) -> Iterator[str]:
        facts, optimizers = self.facts, self.facts.optimizers
        steps = [rank_steps for opt in optimizers for rank_steps in opt.steps]
        compared = "options" if any(map(any_gradient_differs, steps)) else "options, state and gradients"
        if facts.shards:
            compared = "options, number of steps and scale of the shards' gradients"
        scope = f"of {plural(len(optimizers), 'optimizer')} match between ranks in {plural(len(steps), 'step')}"
        averaged = [rank_steps for rank_steps in steps if all(step.reductions >= 0 for step in rank_steps)]
        differ = sum(bool(names_differing([step.norms for step in rank_steps])) for rank_steps in averaged)
        if steps:
            yield f"{compared} {scope}"
        if reason := f"gradients differ between ranks in {differ} of them" if differ else facts.why_unwatched:
            raise NotRecorded(reason)


@dataclass(frozen=True, slots=True)
class OptimizedParameters(View):
    """Wrapped parameters that have gradients, and the parameters that optimizers hold."""

    checks = ("optimizers",)
    moved: Mapping[str, bool]  # True if the values change, by name of the wrapped parameter
    names: Collection[str]  # parameters that optimizers hold
    made: Location | None = None  # line that constructs an optimizer
    lacks_gradients: bool = False  # if no parameter of an optimizer has a gradient
    wrappers: Sequence[WrapperTrace] = ()

    @classmethod
    def from_facts(cls, facts: ScriptFacts) -> Self | None:
        if not facts.wrappers:
            return None
        steps = [step for rank_steps in facts.events(OptimizerStep) for step in rank_steps]
        names = {name for step in steps for name in (*step.ddp_params, *step.idle_params)}
        made = next((step.built_at for step in steps if step.ddp_params or not names), None)
        lacks_gradients = bool(steps) and not any(step.norms or step.gradients for step in steps)
        return cls(facts.moved, names, made, lacks_gradients, facts.wrappers)


@dataclass(frozen=True, slots=True)
class Metrics(View):
    """Metrics passed to schedulers and callbacks, except for optimizers with rank-local gradients."""

    checks = ("optimizers",)
    uses: Sequence[Sequence[MetricUsed]]  # by rank, in order of time

    @classmethod
    def from_facts(cls, facts: ScriptFacts) -> Self:
        local = {opt.steps[0][0].optimizer for opt in facts.optimizers if opt.steps and are_local(opt.steps)}
        return cls([[use for use in uses if use.optimizer not in local] for uses in facts.events(MetricUsed)])
