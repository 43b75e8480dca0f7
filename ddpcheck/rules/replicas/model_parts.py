"""Judges of models that are split over ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.replicas import ModelSplit, PartStep
from ddpcheck.findings.evidence.script import Inputs
from ddpcheck.findings.evidence.steps import DdpStepEvidence, LocalStep, ShardedStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import format_ranks, plural
from ddpcheck.rules.data.ddp516_rank_dependent_program_data import judge_model_batches
from ddpcheck.rules.gradients.ddp301_not_synchronised import judge_gradients, judge_hand_split
from ddpcheck.rules.optimizers.ddp504_stale_optimizer import judge_parts_without_optimizer
from ddpcheck.rules.registry import rule
from ddpcheck.rules.replicas.ddp208_parameter_value import judge_values
from ddpcheck.rules.replicas.ddp306_state_diverged import judge_counted_norms, judge_unequal_factors
from ddpcheck.trace.model_parts import HandSplit, ModelParts
from ddpcheck.trace.replicas import differing_names
from ddpcheck.trace.script_facts import PartSteps


def model_groups_of_recipe(
    local: Sequence[LocalStep], parameters: Sequence[Mapping[str, int]]
) -> list[tuple[int, ...]]:
    """Return the groups of ranks that compute one model together (tensor parallelism).

    Ranks of a group have the same samples, different parameters, and a common differentiable collective.
    """
    groups = {call.members for item in local for call in item.forward_calls if call.differentiable}
    models = [
        ranks
        for ranks in sorted(groups)
        if len({local[rank].sample_fingerprints for rank in ranks}) == 1
        and differing_names([parameters[rank] for rank in ranks])
    ]
    return models if sorted(itertools.chain(*models)) == [*range(len(local))] else []


@rule
def judge_hand_splits(split: HandSplit) -> list[Finding]:
    """DDP301: layers of wrapped modules that the script itself splits over ranks."""
    return [finding for wrappers in split.wrappers for finding in judge_hand_split(wrappers, split.facts.world_size)]


def judge_model_parts(
    steps: Sequence[PartSteps], ranks: Sequence[int], split: ModelSplit, *, wrapped: bool = False
) -> list[Finding]:
    """Judge an optimizer's steps on `ranks`, which compute one model together."""
    return (
        ([] if wrapped else judge_parts_without_optimizer(steps, ranks, split))
        or judge_values(steps, ranks, split)
        or judge_unequal_factors(steps, ranks)
        or judge_gradients(steps, ranks, split)
    )


def describe_split(models: Sequence[tuple[int, ...]]) -> str:
    """Describe which ranks compute a model together, and how the recipe's `shard` divides samples."""
    several = f"shard is given a rank's place among the {len(models)} models, which are trained data parallel"
    return (
        f"tensor parallelism: {', '.join(map(format_ranks, models[:4]))}{' ...' if len(models) > 4 else ''} compute a "
        f"model together, and are given the same samples ({several if len(models) > 1 else 'all of them'}); each rank "
        "alone and the single process compute the unsplit model"
    )


def judge_norms_of_steps(evidence: Sequence[DdpStepEvidence], models: Sequence[tuple[int, ...]]) -> list[Finding]:
    """DDP306: clipping norms in a recipe's steps that count replicated parameters once per rank."""
    by_step: dict[int, dict[int, PartStep]] = {}
    for item in evidence:
        if isinstance(item, ShardedStep) and item.norms:
            by_step.setdefault(item.step, {})[item.rank] = PartStep(
                0, item.step, item.updated_at, split=item.split, norms=item.norms, sharded=item.sharded
            )
    complete_steps = [ranks for ranks in by_step.values() if all(rank in ranks for model in models for rank in model)]
    groups = [[[by_rank[rank] for rank in model] for by_rank in complete_steps] for model in models]
    return judge_counted_norms(groups, models) if complete_steps and models else []


@rule
def judge_groups(parts: ModelParts) -> list[Finding]:
    """Judge ranks sharing a model: samples, steps, gradient norms, until any has findings."""
    facts, steps = parts.facts, parts.steps
    groups, wrapped, inputs = list(facts.model_groups), bool(facts.wrappers), facts.events(Inputs)
    data_findings, step_findings = [], []
    for (ranks, split), optimizers in zip(facts.model_groups.items(), steps, strict=True):
        indices = [index for index, rank in enumerate(facts.ranks) if rank.started.rank in ranks]
        other_passes = [rank_passes for index, rank_passes in enumerate(facts.passes) if index not in indices]
        passes = [facts.passes[index] for index in indices]
        parts_given = any(step.splits_inputs for opt_steps in optimizers for group in opt_steps for step in group)
        group_inputs = [[] if parts_given else inputs[index] for index in indices]
        data_findings.append(judge_model_batches(passes, group_inputs, ranks, split, other_passes))
        findings = (judge_model_parts(opt_steps, ranks, split, wrapped=wrapped) for opt_steps in optimizers)
        step_findings.append(next(filter(None, findings), []))
    norms = (judge_counted_norms(group_steps, groups) for group_steps in zip(*steps, strict=False))
    return _merge_groups(data_findings) or _merge_groups(step_findings) or next(filter(None, norms), [])


def _merge_groups(findings_by_group: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return the first group's findings, on the ranks of all groups with equal findings."""
    first = next(filter(None, findings_by_group), ())
    codes = {finding.code for finding in first}
    equal_groups = [findings for findings in findings_by_group if {finding.code for finding in findings} == codes]
    ranks = tuple(sorted({rank for findings in equal_groups for finding in findings for rank in finding.ranks}))
    group_note = [f"so it is in {plural(len(equal_groups), 'group')} of ranks"] if len(equal_groups) > 1 else []
    return [replace(finding, ranks=ranks, evidence=(*finding.evidence, *group_note)) for finding in first]
