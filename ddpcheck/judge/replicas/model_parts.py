"""DDP208, 301, 306, 504 and 516: ranks that compute one model together (tensor parallelism)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ddpcheck.findings.evidence.gradients import LEAST
from ddpcheck.findings.evidence.replicas import ModelSplit, PartStep
from ddpcheck.findings.evidence.script import Inputs, LoaderPass
from ddpcheck.findings.evidence.steps import DdpStepEvidence, LocalStep, ShardedStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import counted, format_ranks, join_names, one_finding, plural_verb
from ddpcheck.judge.gradients.reducer import PLAN_ADVICE
from ddpcheck.judge.gradients.script_alone import are_near
from ddpcheck.judge.replicas.descriptions import differing_names
from ddpcheck.judge.script_facts import PartSteps, ScriptFacts
from ddpcheck.judge.verdict import Verdict, Verdicts

_TOLERANCE = 1e-3
_THE_SAME = 1e-4
_FEWEST = 3  # steps


def judge_model_parts(
    steps: Sequence[PartSteps], ranks: Sequence[int], split: ModelSplit, *, wrapped: bool = False
) -> list[Finding]:
    """Judge the steps of one optimizer."""
    return (
        ([] if wrapped else judge_unheld_parts(steps, ranks, split))
        or judge_values(steps, ranks, split)
        or judge_scaled_apart(steps, ranks)
        or judge_gradients(steps, ranks, split)
    )


def judge_unheld_parts(steps: Sequence[PartSteps], ranks: Sequence[int], split: ModelSplit) -> list[Finding]:
    """DDP504: an optimizer constructed before the model was split, with the old parameters."""
    for rank_steps in steps[-1:]:
        first = rank_steps[0]
        if all(step.unheld and not step.split for step in rank_steps):
            return one_finding(
                "DDP504",
                first.unheld,
                f"The optimizer holds none of the {counted(len(first.unheld), 'parameter')} that "
                f"{plural_verb('is', 'are', first.unheld)} split over {format_ranks(ranks)}: it has the previous ones, "
                "which are no longer in a module.",
                location=first.made or first.location,
                related={"model split": split.location, "optimizer steps": first.location},
                fix="Call parallelize_module before the optimizer is constructed.",
            )
    return []


def judge_values(steps: Sequence[PartSteps], ranks: Sequence[int], split: ModelSplit) -> list[Finding]:
    """DDP208: replicated parameters with different initial values on ranks of one model."""
    names = list(differing_names([step.values for step in steps[0]])) if steps and not steps[0][0].count else []
    if not names:
        return []
    return one_finding(
        "DDP208",
        names,
        f"{join_names(names)} {plural_verb('begins', 'begin', names)} with different values on {format_ranks(ranks)}, "
        "which compute one model together (tensor parallelism): nothing makes replicated parameters the same.",
        ranks=ranks,
        location=split.location,
        evidence=["parallelize_module broadcasts rank 0's values of the modules in its plan, and no others"],
        fix="Seed the construction of the model equally on these ranks, or broadcast the parameters within their "
        "group.",
    )


def judge_scaled_apart(steps: Sequence[PartSteps], ranks: Sequence[int]) -> list[Finding]:
    """DDP306: gradients scaled by a different factor on each rank (norm of local parts)."""
    scaled = [(rank_steps, factors) for rank_steps in steps if (factors := _factors(rank_steps)) is not None]
    if not scaled or 2 * len(scaled) <= len(steps):
        return []
    rank_steps, factors = scaled[0]
    first = rank_steps[0]
    return one_finding(
        "DDP306",
        ("gradients",),
        f"The gradients are scaled by a different factor on each of {format_ranks(ranks)}, which compute one model "
        "together: each factor is computed from the norm of the rank's own parts.",
        ranks=ranks,
        steps=(first.count,),
        location=first.norm_at or first.location,
        related={"optimizer steps": first.location},
        evidence=[
            f"rank {rank}: {factor:.6g} times those of rank {ranks[0]}"
            for rank, factor in zip(ranks, factors, strict=True)
        ],
        fix="all_reduce the squared norms of the sharded parameters over the tensor-parallel group, and count "
        "replicated ones once; or keep DTensors, for which clip_grad_norm_ computes the norm of the whole.",
    )


def _factors(rank_steps: PartSteps) -> list[float] | None:
    """Return each rank's uniform gradient scale relative to the first rank, or `None`."""
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
            if math.dist(gradient, [factor * number for number in reference]) > _TOLERANCE * math.hypot(*gradient):
                return None
            by_name.append(factor)
        if max(by_name) - min(by_name) > _TOLERANCE * max(by_name) or min(by_name) <= 0.0:
            return None
        factors.append(by_name[0])
    return factors if max(factors) - min(factors) > _TOLERANCE * max(factors) else None


def judge_gradients(steps: Sequence[PartSteps], ranks: Sequence[int], split: ModelSplit) -> list[Finding]:
    """DDP301: gradients of replicated parameters that differ between ranks of one model."""
    mismatches = [(rank_steps, names) for rank_steps in steps if (names := _differing(rank_steps))]
    if not mismatches or 2 * len(mismatches) <= len(steps):
        return []
    rank_steps, names = mismatches[0]
    drawn = _draw_apart(steps)
    seeded = next((step.seeded for step in rank_steps if step.seeded is not None), None) if drawn else None
    message = (
        f"The {plural_verb('gradient', 'gradients', names)} of {join_names(names)} "
        f"{plural_verb('differs', 'differ', names)} between {format_ranks(ranks)}, which compute one model together "
        f"(tensor parallelism) and replicate {plural_verb('it', 'them', names)}: "
    )
    return one_finding(
        "DDP301",
        names,
        message
        + (
            "each rank draws different random numbers."
            if drawn
            else "each has the gradient of its part, and nothing adds them up."
        ),
        ranks=ranks,
        steps=(rank_steps[0].count,),
        location=seeded or split.location or rank_steps[0].location,
        evidence=[
            "the state of torch's generator differs between these ranks before each step, and each step draws from it"
            if drawn
            else "such as its own part of the sequence, if replicated layers work on a part",
        ],
        related={"optimizer steps": rank_steps[0].location},
        fix="Seed ranks that compute one model together equally (by their place in the data dimension of the mesh): "
        "dropout and similar layers have to give all of them the same result."
        if drawn
        else PLAN_ADVICE,
    )


def _differing(rank_steps: PartSteps) -> list[str]:
    first = rank_steps[0].gradients
    common = [name for name in first if all(name in step.gradients for step in rank_steps)]
    return [name for name in common if not are_near([step.gradients[name] for step in rank_steps])]


def _draw_apart(steps: Sequence[PartSteps]) -> bool:
    """Return True if generator states differ between ranks and advance in every step."""
    states = list(zip(*([step.random for step in rank_steps] for rank_steps in steps), strict=True))
    moves = all(before != after for by_step in states for before, after in itertools.pairwise(by_step[:_FEWEST]))
    return moves and all(len({step.random for step in rank_steps}) > 1 for rank_steps in steps)


# Norms


def judge_counted_norms(groups: Sequence[Sequence[PartSteps]], ranks: Sequence[Sequence[int]]) -> list[Finding]:
    """DDP306: gradients clipped by a norm that counts replicated parameters once per rank.

    The wrong norm is then the same in all clipped steps, and the norm of the whole model is not.
    """
    wrong, right = [], []
    size = len(ranks[0])
    for group_steps in zip(*groups, strict=False):
        names = {name for rank_steps in group_steps for step in rank_steps for name in step.norms}
        squares = [_squares(name, group_steps) for name in names]
        right.append(math.sqrt(sum(squares)))
        whole = {name for name in names if name not in group_steps[0][0].split}
        wrong.append(math.sqrt(sum(s * (size if name in whole else 1) for name, s in zip(names, squares, strict=True))))
    limit = max(wrong, default=0.0)
    clipped = [n for n, norm in enumerate(wrong) if limit - norm <= _THE_SAME * limit]
    true = [right[n] for n in clipped]
    if size < 2 or not 0.0 < limit < math.inf or len(clipped) < _FEWEST or max(true) - min(true) <= _TOLERANCE * limit:
        return []
    first = groups[0][0][0]
    return one_finding(
        "DDP306",
        ("gradients",),
        f"Gradients are clipped by a norm that counts each replicated parameter {size} times, once for each rank of "
        "tensor parallelism: it is not that of the model.",
        location=first.norm_at or first.location,
        evidence=[
            f"in {len(clipped)} steps that norm is {limit:.6g}, and that of the gradients from {min(true):.6g} to "
            f"{max(true):.6g}",
        ],
        related={"optimizer steps": first.location},
        fix="Add up the squared norms of sharded parameters over the tensor-parallel group, and count replicated ones "
        "once.",
    )


def _squares(name: str, group_steps: Sequence[PartSteps]) -> float:
    """Return the squared norm of a parameter's whole gradient, summed over its parts."""
    total = 0.0
    for rank_steps in group_steps if name in group_steps[0][0].sharded else group_steps[:1]:
        for step in rank_steps if name in rank_steps[0].split else rank_steps[:1]:
            total += step.norms.get(name, 0.0) ** 2
    return total


# Data


def judge_batches(
    passes: Sequence[Sequence[LoaderPass]],
    inputs: Sequence[Sequence[Inputs]],
    ranks: Sequence[int],
    split: ModelSplit,
    others: Sequence[Sequence[LoaderPass]] = (),
) -> list[Finding]:
    """DDP516: ranks of one model with different samples."""
    first = [next((loader for loader in loaders if loader.trains and loader.indices), None) for loaders in passes]
    trained = [loader for loader in first if loader is not None]
    size = min((len(loader.indices) for loader in trained), default=0)
    differs = len(trained) == len(passes) and len({tuple(loader.indices[:size]) for loader in trained}) > 1
    location: Location | None
    if differs:
        loader = trained[0]
        subject, location = loader.dataset, loader.made or loader.location
        evidence = [
            f"rank {rank} begins with samples {', '.join(map(str, loader.indices[:6]))} ..."
            for rank, loader in zip(ranks, trained, strict=True)
        ]
        taken = [tuple(loader.indices[:size]) for loader in trained]
        if any(tuple(loader.indices[:size]) in taken for loaders in others for loader in loaders if loader.trains):
            evidence.append("a rank of another replica takes the same samples as one of these ranks")
    else:
        steps = [calls for calls in zip(*inputs, strict=False) if len({call.step for call in calls}) == 1]
        mismatches = [calls for calls in steps if len({call.samples for call in calls}) > 1]
        if len(mismatches) < _FEWEST or len(mismatches) < len(steps):
            return []
        subject, location = "forward", mismatches[0][0].location
        evidence = [f"in all {len(mismatches)} steps that were compared"]
    return one_finding(
        "DDP516",
        (subject,),
        f"{format_ranks(ranks).capitalize()} compute one model together (tensor parallelism), and are given different "
        "samples: the model combines parts that were computed from different batches.",
        ranks=ranks,
        location=location,
        evidence=[*evidence, f"the model is split at {split.location}" if split.location else ""],
        fix="Give the sampler the size of the data dimension of the mesh and this rank's place in it: "
        'DistributedSampler(data, num_replicas=mesh["dp"].size(), rank=mesh["dp"].get_local_rank()); and seed by '
        "that place the generator that draws batches.",
    )


def how_split(models: Sequence[tuple[int, ...]]) -> str:
    """Describe which ranks compute a model together, and the arguments of `shard`."""
    several = f"shard is given a rank's place among the {len(models)} models, which are trained data parallel"
    return (
        f"tensor parallelism: {', '.join(map(format_ranks, models[:4]))}{' ...' if len(models) > 4 else ''} compute a "
        f"model together, and are given the same samples ({several if len(models) > 1 else 'all of them'}); each rank "
        "alone and the single process compute the unsplit model"
    )


def judge_shards(local: Sequence[LocalStep], models: Sequence[tuple[int, ...]]) -> list[Finding]:
    """DDP516: a recipe's `shard` returns different samples on ranks of one model."""
    groups = [ranks for ranks in models if len({local[rank].sample_fingerprints for rank in ranks}) > 1]
    if not groups:
        return []
    ranks = tuple(sorted(rank for of_model in groups for rank in of_model))
    return one_finding(
        "DDP516",
        ("shard",),
        f"{format_ranks(groups[0]).capitalize()} compute one model together (tensor parallelism), and shard gives them "
        "different samples: the model combines parts that were computed from different batches.",
        ranks=ranks,
        steps=(local[0].evidence.step,),
        evidence=[f"so it is in {counted(len(groups), 'group')} of ranks"] if len(groups) > 1 else [],
        fix="Split the batch by the arguments of shard, which are a rank's place in the data dimension of the mesh and "
        "the size of that, and not by the rank in the world.",
    )


def judge_norms_of_steps(evidence: Sequence[DdpStepEvidence], models: Sequence[tuple[int, ...]]) -> list[Finding]:
    """DDP306: `judge_counted_norms` on the gradient norms of a recipe's steps."""
    by_step: dict[int, dict[int, PartStep]] = {}
    for item in evidence:
        if isinstance(item, ShardedStep) and item.norms:
            by_step.setdefault(item.step, {})[item.rank] = PartStep(
                0, item.step, item.updated_at, split=item.split, norms=item.norms, sharded=item.sharded
            )
    whole = [ranks for ranks in by_step.values() if all(rank in ranks for model in models for rank in model)]
    groups = [[[by_rank[rank] for rank in model] for by_rank in whole] for model in models]
    return judge_counted_norms(groups, models) if whole and models else []


def compare_groups(facts: ScriptFacts) -> Verdicts:
    """Judge all groups of ranks of one model; return verdicts by check line."""
    groups = list(facts.model_groups)
    steps = [facts.part_steps(ranks) for ranks in groups]
    wrapped, inputs = bool(facts.wrappers), facts.of(Inputs)
    data_findings, step_findings = [], []
    for (ranks, split), optimizers in zip(facts.model_groups.items(), steps, strict=True):
        indices = [index for index, rank in enumerate(facts.ranks) if rank.started.rank in ranks]
        other_passes = [rank_passes for index, rank_passes in enumerate(facts.passes) if index not in indices]
        passes = [facts.passes[index] for index in indices]
        parts_given = any(step.parts_given for opt_steps in optimizers for group in opt_steps for step in group)
        group_inputs = [[] if parts_given else inputs[index] for index in indices]
        data_findings.append(judge_batches(passes, group_inputs, ranks, split, other_passes))
        findings = (judge_model_parts(opt_steps, ranks, split, wrapped=wrapped) for opt_steps in optimizers)
        step_findings.append(next(filter(None, findings), []))
    data = _of_groups(data_findings)
    parts = [] if data else _of_groups(step_findings)
    for group_steps in () if data or parts else zip(*steps, strict=False):
        parts = parts or judge_counted_norms(group_steps, groups)
    compared = max((len(opt_steps) for group in steps for opt_steps in group), default=0)
    message = f"no fault in replicated parameters, in {counted(compared, 'step')}" if compared else ""
    return {"replicas": Verdict(parts, message), "data": Verdict(data)}


def _of_groups(findings_by_group: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return the first group's findings, with the ranks of groups with equal codes."""
    first = next(filter(None, findings_by_group), ())
    codes = {finding.code for finding in first}
    alike = [findings for findings in findings_by_group if {finding.code for finding in findings} == codes]
    ranks = tuple(sorted({rank for findings in alike for finding in findings for rank in finding.ranks}))
    more = [f"so it is in {counted(len(alike), 'group')} of ranks"] if len(alike) > 1 else []
    return [replace(finding, ranks=ranks, evidence=(*finding.evidence, *more)) for finding in first]
