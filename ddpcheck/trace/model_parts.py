"""Models that torch (tensor parallelism) or the script itself splits over ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddpcheck.findings.evidence.gradients import LEAST
from ddpcheck.findings.evidence.script import Inputs
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import group_by, plural
from ddpcheck.stream.entries import GroupUsed
from ddpcheck.stream.rank_log import RankTrace
from ddpcheck.trace.script_facts import PartSteps, WrapperTrace, entries_of
from ddpcheck.trace.view import ScriptView

_FEWEST_INPUTS = 2


def hand_split(wrappers: Sequence[WrapperTrace], world_size: int) -> dict[tuple[int, ...], Location]:
    """Find groups of ranks that split a model by the script's own differentiable collectives.

    Return the line of such a collective for each group of ranks, or {} unless the groups contain all ranks.
    """
    first, indices = wrappers[0].made, {n: index for index, wrapper in enumerate(wrappers) for n in wrapper.made.ranks}
    ranks = {rank.started.rank: rank for wrapper in wrappers for rank in wrapper.ranks}
    is_same_module = all(
        wrapper.made.context.sharded is None
        and (wrapper.made.module, wrapper.made.context.trainable) == (first.module, first.context.trainable)
        for wrapper in wrappers
    )
    if len(wrappers) < 2 or not is_same_module or len(ranks) < world_size:
        return {}
    used = [use for rank in ranks.values() for use in entries_of(rank, GroupUsed)]
    lines = {use.members: use.differentiated_at for use in used if use.differentiated_at is not None}
    model_lines = {
        members: line
        for members, line in lines.items()
        if 1 < len(members) == len({indices.get(n) for n in members})
        and _have_equal_inputs([ranks[n] for n in members], wrappers[0].number)
    }
    return model_lines if sorted(itertools.chain(*model_lines)) == sorted(ranks) else {}


def _have_equal_inputs(ranks: Sequence[RankTrace], wrapper: int) -> bool:
    samples = [[inputs.samples for inputs in entries_of(rank, Inputs) if inputs.wrapper == wrapper] for rank in ranks]
    return min(map(len, samples)) >= _FEWEST_INPUTS and all(rank_samples == samples[0] for rank_samples in samples)


@dataclass(frozen=True, slots=True)
class HandSplit(ScriptView):
    """Wrappers whose ranks compute one model together by collectives of the script."""

    checks = ("replicas",)

    @property
    def wrappers(self) -> list[list[WrapperTrace]]:
        """Wrappers of split models; a group has the n-th wrapper of every rank."""
        by_number = group_by(() if self.facts.model_groups else self.facts.wrappers, lambda wrapper: wrapper.number)
        return [wrappers for wrappers in by_number.values() if hand_split(wrappers, self.facts.world_size)]

    def compared(self, check: str, findings: Sequence[Finding]) -> Iterator[str]:
        if self.wrappers:
            yield "no fault in parameters that start equal on ranks that compute one model together"


@dataclass(frozen=True, slots=True)
class ModelParts(ScriptView):
    """Steps and samples of ranks that compute one model together (tensor parallelism)."""

    checks = ("data", "replicas")

    @property
    def steps(self) -> list[list[Sequence[PartSteps]]]:
        """Optimizer steps, by group of ranks and by optimizer."""
        return [self.facts.part_steps(ranks) for ranks in self.facts.model_groups]

    def compared(self, check: str, findings: Sequence[Finding]) -> Iterator[str]:
        count = max((len(opt_steps) for group in self.steps for opt_steps in group), default=0)
        if count and check == "replicas":
            yield f"no fault in replicated parameters, in {plural(count, 'step')}"


MIN_PART_STEPS = 3  # steps needed for a finding
NORM_TOLERANCE = 1e-3  # relative error of gradient norms and of sketches


def gradient_factors(rank_steps: PartSteps) -> list[float] | None:
    """Return each rank's constant gradient factor relative to the first rank, or None.

    The result is None if a rank's factor differs between parameters, or all ranks have the same factor.
    """
    first = rank_steps[0]
    names = [name for name, gradient in first.gradients.items() if math.hypot(*gradient) > LEAST]
    if len(names) < 2 or any(step.gradients.keys() != first.gradients.keys() for step in rank_steps):
        return None
    factors = []
    for step in rank_steps:
        by_name = []
        for name in names:
            gradient, reference = step.gradients[name], first.gradients[name]
            factor = sum(a * b for a, b in zip(gradient, reference, strict=True)) / math.hypot(*reference) ** 2
            if math.dist(gradient, [factor * number for number in reference]) > NORM_TOLERANCE * math.hypot(*gradient):
                return None
            by_name.append(factor)
        if max(by_name) - min(by_name) > NORM_TOLERANCE * max(by_name) or min(by_name) <= 0.0:
            return None
        factors.append(by_name[0])
    return factors if max(factors) - min(factors) > NORM_TOLERANCE * max(factors) else None


def squared_norm(name: str, group_steps: Sequence[PartSteps]) -> float:
    """Return the squared norm of a whole gradient, which ranks may have parts of."""
    total = 0.0
    for rank_steps in group_steps if name in group_steps[0][0].sharded else group_steps[:1]:
        for step in rank_steps if name in rank_steps[0].split else rank_steps[:1]:
            total += step.norms.get(name, 0.0) ** 2
    return total
