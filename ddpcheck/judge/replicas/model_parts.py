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
    for of_ranks in steps[-1:]:
        first = of_ranks[0]
        if all(one.unheld and not one.split for one in of_ranks):
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
    names = list(differing_names([one.values for one in steps[0]])) if steps and not steps[0][0].count else []
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
    found = [(of_ranks, factors) for of_ranks in steps if (factors := _factors(of_ranks)) is not None]
    if not found or 2 * len(found) <= len(steps):
        return []
    of_ranks, factors = found[0]
    first = of_ranks[0]
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


def _factors(of_ranks: PartSteps) -> list[float] | None:
    """Return each rank's uniform gradient scale relative to the first rank, or `None`."""
    first = of_ranks[0]
    names = [name for name, there in first.gradients.items() if math.hypot(*there) > LEAST]
    if len(names) < 2 or any(one.gradients.keys() != first.gradients.keys() for one in of_ranks):
        return None
    found = []
    for one in of_ranks:
        by_name = []
        for name in names:
            theirs, own = one.gradients[name], first.gradients[name]
            factor = sum(a * b for a, b in zip(theirs, own, strict=True)) / math.hypot(*own) ** 2
            if math.dist(theirs, [factor * number for number in own]) > _TOLERANCE * math.hypot(*theirs):
                return None
            by_name.append(factor)
        if max(by_name) - min(by_name) > _TOLERANCE * max(by_name) or min(by_name) <= 0.0:
            return None
        found.append(by_name[0])
    return found if max(found) - min(found) > _TOLERANCE * max(found) else None


def judge_gradients(steps: Sequence[PartSteps], ranks: Sequence[int], split: ModelSplit) -> list[Finding]:
    """DDP301: gradients of replicated parameters that differ between ranks of one model."""
    apart = [(of_ranks, names) for of_ranks in steps if (names := _differing(of_ranks))]
    if not apart or 2 * len(apart) <= len(steps):
        return []
    of_ranks, names = apart[0]
    drawn = _draw_apart(steps)
    seeded = next((one.seeded for one in of_ranks if one.seeded is not None), None) if drawn else None
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
        steps=(of_ranks[0].count,),
        location=seeded or split.location or of_ranks[0].location,
        evidence=[
            "the state of torch's generator differs between these ranks before each step, and each step draws from it"
            if drawn
            else "such as its own part of the sequence, if replicated layers work on a part",
        ],
        related={"optimizer steps": of_ranks[0].location},
        fix="Seed ranks that compute one model together equally (by their place in the data dimension of the mesh): "
        "dropout and similar layers have to give all of them the same result."
        if drawn
        else PLAN_ADVICE,
    )


def _differing(of_ranks: PartSteps) -> list[str]:
    first = of_ranks[0].gradients
    common = [name for name in first if all(name in one.gradients for one in of_ranks)]
    return [name for name in common if not are_near([one.gradients[name] for one in of_ranks])]


def _draw_apart(steps: Sequence[PartSteps]) -> bool:
    """Return True if generator states differ between ranks and advance in every step."""
    states = list(zip(*([one.random for one in of_ranks] for of_ranks in steps), strict=True))
    moves = all(one != other for of_rank in states for one, other in itertools.pairwise(of_rank[:_FEWEST]))
    return moves and all(len({one.random for one in of_ranks}) > 1 for of_ranks in steps)


# Norms


def judge_counted_norms(groups: Sequence[Sequence[PartSteps]], ranks: Sequence[Sequence[int]]) -> list[Finding]:
    """DDP306: gradients clipped by a norm that counts replicated parameters once per rank.

    The wrong norm is then the same in all clipped steps, and the norm of the whole model is not.
    """
    wrong, right = [], []
    size = len(ranks[0])
    for at in zip(*groups, strict=False):
        names = {name for of_ranks in at for one in of_ranks for name in one.norms}
        theirs = [_squares(name, at) for name in names]
        right.append(math.sqrt(sum(theirs)))
        whole = {name for name in names if name not in at[0][0].split}
        wrong.append(math.sqrt(sum(s * (size if name in whole else 1) for name, s in zip(names, theirs, strict=True))))
    limit = max(wrong, default=0.0)
    clipped = [n for n, norm in enumerate(wrong) if limit - norm <= _THE_SAME * limit]
    told = [right[n] for n in clipped]
    if size < 2 or not 0.0 < limit < math.inf or len(clipped) < _FEWEST or max(told) - min(told) <= _TOLERANCE * limit:
        return []
    first = groups[0][0][0]
    return one_finding(
        "DDP306",
        ("gradients",),
        f"Gradients are clipped by a norm that counts each replicated parameter {size} times, once for each rank of "
        "tensor parallelism: it is not that of the model.",
        location=first.norm_at or first.location,
        evidence=[
            f"in {len(clipped)} steps that norm is {limit:.6g}, and that of the gradients from {min(told):.6g} to "
            f"{max(told):.6g}",
        ],
        related={"optimizer steps": first.location},
        fix="Add up the squared norms of sharded parameters over the tensor-parallel group, and count replicated ones "
        "once.",
    )


def _squares(name: str, at: Sequence[PartSteps]) -> float:
    """Return the squared norm of a parameter's whole gradient, summed over its parts."""
    total = 0.0
    for of_ranks in at if name in at[0][0].sharded else at[:1]:
        for one in of_ranks if name in of_ranks[0].split else of_ranks[:1]:
            total += one.norms.get(name, 0.0) ** 2
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
    first = [next((one for one in of_rank if one.trains and one.indices), None) for of_rank in passes]
    known = [one for one in first if one is not None]
    size = min((len(one.indices) for one in known), default=0)
    apart = len(known) == len(passes) and len({tuple(one.indices[:size]) for one in known}) > 1
    where: Location | None
    if apart:
        one = known[0]
        subject, where = one.dataset, one.made or one.location
        evidence = [
            f"rank {rank} begins with samples {', '.join(map(str, of_rank.indices[:6]))} ..."
            for rank, of_rank in zip(ranks, known, strict=True)
        ]
        mine = [tuple(of_rank.indices[:size]) for of_rank in known]
        if any(tuple(each.indices[:size]) in mine for of_rank in others for each in of_rank if each.trains):
            evidence.append("a rank of another replica takes the same samples as one of these ranks")
    else:
        steps = [of_ranks for of_ranks in zip(*inputs, strict=False) if len({one.step for one in of_ranks}) == 1]
        other = [of_ranks for of_ranks in steps if len({one.samples for one in of_ranks}) > 1]
        if len(other) < _FEWEST or len(other) < len(steps):
            return []
        subject, where = "forward", other[0][0].location
        evidence = [f"in all {len(other)} steps that were compared"]
    return one_finding(
        "DDP516",
        (subject,),
        f"{format_ranks(ranks).capitalize()} compute one model together (tensor parallelism), and are given different "
        "samples: the model combines parts that were computed from different batches.",
        ranks=ranks,
        location=where,
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
    apart = [ranks for ranks in models if len({local[rank].sample_fingerprints for rank in ranks}) > 1]
    if not apart:
        return []
    ranks = tuple(sorted(rank for of_model in apart for rank in of_model))
    return one_finding(
        "DDP516",
        ("shard",),
        f"{format_ranks(apart[0]).capitalize()} compute one model together (tensor parallelism), and shard gives them "
        "different samples: the model combines parts that were computed from different batches.",
        ranks=ranks,
        steps=(local[0].evidence.step,),
        evidence=[f"so it is in {counted(len(apart), 'group')} of ranks"] if len(apart) > 1 else [],
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
    groups = [[[of_step[rank] for rank in model] for of_step in whole] for model in models]
    return judge_counted_norms(groups, models) if whole and models else []


def compare_groups(facts: ScriptFacts) -> Verdicts:
    """Judge all groups of ranks of one model; return verdicts by check line."""
    groups = list(facts.model_groups)
    steps = [facts.part_steps(ranks) for ranks in groups]
    wrapped, inputs = bool(facts.wrappers), facts.of(Inputs)
    of_data, of_steps = [], []
    for (ranks, split), optimizers in zip(facts.model_groups.items(), steps, strict=True):
        theirs = [place for place, rank in enumerate(facts.ranks) if rank.started.rank in ranks]
        others = [of_rank for place, of_rank in enumerate(facts.passes) if place not in theirs]
        own = [facts.passes[place] for place in theirs]
        parts_given = any(one.parts_given for of_one in optimizers for of_ranks in of_one for one in of_ranks)
        given = [[] if parts_given else inputs[place] for place in theirs]
        of_data.append(judge_batches(own, given, ranks, split, others))
        found = (judge_model_parts(one, ranks, split, wrapped=wrapped) for one in optimizers)
        of_steps.append(next(filter(None, found), []))
    data = _of_groups(of_data)
    parts = [] if data else _of_groups(of_steps)
    for same in () if data or parts else zip(*steps, strict=False):
        parts = parts or judge_counted_norms(same, groups)
    compared = max((len(one) for of_group in steps for one in of_group), default=0)
    what = f"no fault in replicated parameters, in {counted(compared, 'step')}" if compared else ""
    return {"replicas": Verdict(parts, what), "data": Verdict(data)}


def _of_groups(found: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return the first group's findings, with the ranks of groups with equal codes."""
    first = next(filter(None, found), ())
    codes = {finding.code for finding in first}
    alike = [of_group for of_group in found if {finding.code for finding in of_group} == codes]
    ranks = tuple(sorted({rank for of_group in alike for finding in of_group for rank in finding.ranks}))
    more = [f"so it is in {counted(len(alike), 'group')} of ranks"] if len(alike) > 1 else []
    return [replace(one, ranks=ranks, evidence=(*one.evidence, *more)) for one in first]
