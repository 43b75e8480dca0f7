"""DDP303: gradients summed over ranks by hand, without dividing by the world size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import mul

from ddpcheck.findings.evidence.script import OptimizerStep
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import counted, one_finding
from ddpcheck.judge.gradients.script_alone import are_near
from ddpcheck.judge.gradients.script_losses import FEWEST_PASSES, SCALE_FREE, Losses, is_near

_TOLERANCE = 1e-3


def judge_summed_again(steps: Sequence[Sequence[OptimizerStep]], world_size: int) -> list[Finding]:
    """Detect gradients that are summed by hand after DDP averaged them (DDP303)."""
    summed = [
        of_ranks for of_ranks in steps if all(one.averaged and set(one.summed) & set(one.held) for one in of_ranks)
    ]
    if len(summed) < FEWEST_PASSES or len(summed) < len(steps):
        return []
    first = summed[0][0]
    return one_finding(
        "DDP303",
        ("all_reduce",),
        f"DDP has averaged the gradients, and an all_reduce sums them over the ranks again: they are {world_size} "
        "times those of the mean.",
        location=first.summed_at,
        evidence=[
            f"in all {len(summed)} optimizer steps that were compared, of {counted(len(first.summed), 'parameter')}"
        ],
        severity=Severity.WARNING,
        fix="Remove the all_reduce: DDP averages the gradients in backward.",
    )


def judge_sums(steps: Sequence[Sequence[OptimizerStep]], losses: Losses) -> list[Finding]:
    """Detect gradients summed by hand for losses that are per-rank means (DDP303).

    Optimizers that are invariant to gradient scale hide the factor, unless gradients are clipped before the step.
    """
    last = {one.step: one.number + 1 for one in losses[0]}  # micro-batches by step
    means = [
        not one.wrappers
        and all(term.kind == "mean" for term in one.terms)
        and any(is_near(1.0, abs(term.factor) * times) for term in one.terms for times in (1, last[one.step]))
        for one in losses[0]
        if one.terms
    ]
    known = [of_ranks for of_ranks in steps if all(one.local for one in of_ranks)]
    factors = [_times_average(of_ranks, of_ranks[0].unclipped or of_ranks[0].gradients) for of_ranks in known]
    size = len(steps[0]) if steps else 0
    summed = [of_ranks for of_ranks, times in zip(known, factors, strict=True) if is_near(size, times)]
    if not summed and all(map(_are_alike, known)):
        summed = [of_ranks for of_ranks in steps if all(one.summed for one in of_ranks)]  # by hooks, in backward
        summed = summed if len(summed) == len(steps) else []
    if size < 2 or len(summed) < FEWEST_PASSES or len(means) < FEWEST_PASSES or not all(means):
        return []
    first = summed[0][0]
    kind = first.options.get("class", "")
    hides = kind.startswith(SCALE_FREE)
    exact = not hides and first.options.get("module", "").startswith("torch.")  # other optimizers may divide in step()
    clipped = [one for one in known if not is_near(size, _times_average(one, one[0].gradients))]
    if max(factors, default=0.0) > size * (1 + _TOLERANCE) or (hides and not clipped):
        return []
    hidden = f"steps of {kind} do not depend on the factor, but clipping before them does, in {len(clipped)} of them"
    return one_finding(
        "DDP303",
        ("all_reduce",),
        f"Gradients are summed over the ranks and not divided by their number: they are {size} times those of the mean "
        "over all samples.",
        location=first.summed_at or first.location,
        evidence=[
            f"in {len(summed)} of the {len(known or steps)} optimizer steps that were compared",
            "the loss is a mean over the samples of a rank",
            hidden if hides else "",
        ],
        severity=None if exact else Severity.WARNING,
        fix="Divide by dist.get_world_size() after the all_reduce, or reduce with dist.ReduceOp.AVG if the backend has "
        "it.",
    )


def _are_alike(of_ranks: Sequence[OptimizerStep]) -> bool:
    """Check if backward left equal gradients on all ranks (reduced by hooks)."""
    return all(are_near([one.local.get(name, ()) for one in of_ranks]) for name in of_ranks[0].local)


def _times_average(of_ranks: Sequence[OptimizerStep], used: Mapping[str, Sequence[float]]) -> float:
    """Return the ratio of gradients to the ranks' average; 0.0 if not constant."""
    factors = []
    for name in used.keys() & set.intersection(*(set(one.local) for one in of_ranks)):
        average = [sum(numbers) / len(of_ranks) for numbers in zip(*(one.local[name] for one in of_ranks), strict=True)]
        if power := sum(map(mul, average, average)):
            factors.append(sum(map(mul, average, used[name])) / power)
            if math.dist(used[name], [factors[-1] * x for x in average]) > _TOLERANCE * math.hypot(*used[name]):
                return 0.0
    return factors[0] if factors and all(is_near(factors[0], factor) for factor in factors) else 0.0
