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
        by_rank for by_rank in steps if all(step.averaged and set(step.summed) & set(step.held) for step in by_rank)
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
    passes = {loss.step: loss.number + 1 for loss in losses[0]}  # micro-batches by step
    are_means = [
        not loss.wrappers
        and all(term.kind == "mean" for term in loss.terms)
        and any(is_near(1.0, abs(term.factor) * count) for term in loss.terms for count in (1, passes[loss.step]))
        for loss in losses[0]
        if loss.terms
    ]
    known = [by_rank for by_rank in steps if all(step.local for step in by_rank)]
    factors = [_times_average(by_rank, by_rank[0].unclipped or by_rank[0].gradients) for by_rank in known]
    size = len(steps[0]) if steps else 0
    summed_steps = [by_rank for by_rank, factor in zip(known, factors, strict=True) if is_near(size, factor)]
    if not summed_steps and all(map(_gradients_agree, known)):
        summed_steps = [by_rank for by_rank in steps if all(step.summed for step in by_rank)]  # by hooks, in backward
        summed_steps = summed_steps if len(summed_steps) == len(steps) else []
    if size < 2 or len(summed_steps) < FEWEST_PASSES or len(are_means) < FEWEST_PASSES or not all(are_means):
        return []
    first = summed_steps[0][0]
    kind = first.options.get("class", "")
    scale_free = kind.startswith(SCALE_FREE)
    is_exact = not scale_free and first.options.get("module", "").startswith("torch.")  # others may divide in step()
    clipped = [by_rank for by_rank in known if not is_near(size, _times_average(by_rank, by_rank[0].gradients))]
    if max(factors, default=0.0) > size * (1 + _TOLERANCE) or (scale_free and not clipped):
        return []
    note = f"steps of {kind} do not depend on the factor, but clipping before them does, in {len(clipped)} of them"
    return one_finding(
        "DDP303",
        ("all_reduce",),
        f"Gradients are summed over the ranks and not divided by their number: they are {size} times those of the mean "
        "over all samples.",
        location=first.summed_at or first.location,
        evidence=[
            f"in {len(summed_steps)} of the {len(known or steps)} optimizer steps that were compared",
            "the loss is a mean over the samples of a rank",
            note if scale_free else "",
        ],
        severity=None if is_exact else Severity.WARNING,
        fix="Divide by dist.get_world_size() after the all_reduce, or reduce with dist.ReduceOp.AVG if the backend has "
        "it.",
    )


def _gradients_agree(steps: Sequence[OptimizerStep]) -> bool:
    """Check if backward left equal gradients on all ranks (reduced by hooks)."""
    return all(are_near([step.local.get(name, ()) for step in steps]) for name in steps[0].local)


def _times_average(steps: Sequence[OptimizerStep], grads: Mapping[str, Sequence[float]]) -> float:
    """Return the ratio of gradients to the ranks' average; 0.0 if not constant."""
    factors = []
    for name in grads.keys() & set.intersection(*(set(step.local) for step in steps)):
        average = [sum(values) / len(steps) for values in zip(*(step.local[name] for step in steps), strict=True)]
        if power := sum(map(mul, average, average)):
            factors.append(sum(map(mul, average, grads[name])) / power)
            if math.dist(grads[name], [factors[-1] * x for x in average]) > _TOLERANCE * math.hypot(*grads[name]):
                return 0.0
    return factors[0] if factors and all(is_near(factors[0], factor) for factor in factors) else 0.0
