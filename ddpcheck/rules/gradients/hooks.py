"""Judges of gradients that hooks, clipping or scaling change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.loop import GradientsHooked, HookedGradient
from ddpcheck.findings.report import Finding
from ddpcheck.rules.gradients.ddp310_gradient_changed_before_reduction import hook_finding
from ddpcheck.trace.gradients import MIN_HOOKED_STEPS, UNCHANGED


def judge_hooked(hooks: Sequence[Sequence[GradientsHooked]], steps: Sequence[int]) -> list[Finding]:
    """Report hooks that change local gradients differently on each rank (DDP310).

    Limits on the size of elements always count, because clamping does not commute with the average. Factors of a
    weighted average and weights of batches are intended.
    """
    changes = [{hook.step: hook.changed for hook in rank_hooks} for rank_hooks in hooks]
    steps_by_kind: dict[str, dict[str, list[int]]] = {}  # by kind of change and parameter: steps
    for step in steps:
        by_rank = [by_step.get(step, {}) for by_step in changes]
        for name in dict.fromkeys(name for by_name in by_rank for name in by_name):
            if kind := _hook_difference([by_name.get(name, UNCHANGED) for by_name in by_rank]):
                steps_by_kind.setdefault(kind, {}).setdefault(name, []).append(step)
    for kind in ("scaled", "masked", "limited"):
        names = [name for name, seen in steps_by_kind.get(kind, {}).items() if len(seen) >= MIN_HOOKED_STEPS]
        when = steps_by_kind[kind][names[0]] if names else []
        if names and not (kind == "scaled" and _are_weights(changes, names, when)):
            return hook_finding(hooks, [by_step.get(when[0], {}) for by_step in changes], names, kind, when)
    return _hooked_in_modules(hooks, steps)


def _hooked_in_modules(hooks: Sequence[Sequence[GradientsHooked]], steps: Sequence[int]) -> list[Finding]:
    """Report module backward hooks that scale by a constant factor per rank (DDP310).

    A factor that changes between steps may depend on the samples, as in a single process.
    """
    rank_factors = [{hook.step: hook.factors for hook in rank_hooks if hook.step in steps} for rank_hooks in hooks]
    for name in dict.fromkeys(name for by_step in rank_factors for factors in by_step.values() for name in factors):
        when = sorted({step for by_step in rank_factors for step, factors in by_step.items() if name in factors})
        by_rank = [[by_step.get(step, {}).get(name, 1.0) for step in when] for by_step in rank_factors]
        if len(when) >= MIN_HOOKED_STEPS and not any(map(_factors_differ, by_rank)):
            changes = [HookedGradient("scaled", factors[0]) for factors in by_rank]
            if _hook_difference(changes):
                return hook_finding(hooks, [{name: change} for change in changes], [name], "scaled", when)
    return []


_Hooked = Mapping[int, Mapping[str, HookedGradient]]
"""Gradient changes by hooks on one rank, by step and parameter name."""


def _hook_difference(changes: Sequence[HookedGradient]) -> str:
    """Return how hooks change a gradient differently between ranks, or '' if unknown."""
    kinds = {change.kind for change in changes}
    if "limited" in kinds:
        return "limited"
    if "" in kinds:
        return ""
    if len(kinds) > 1 or len({change.zeros for change in changes}) > 1:
        return "masked"
    factors = [change.number for change in changes]
    average = sum(factors) / len(factors)
    return "scaled" if _factors_differ(factors) and abs(average - 1.0) > _FACTORS_APART else ""


def _are_weights(hooks: Sequence[_Hooked], names: Sequence[str], steps: Sequence[int]) -> bool:
    """Check if each rank scales all gradients by one changing factor: batch weights.

    The script may divide by the sum of weights after the average. A factor on one gradient may have another purpose.
    """
    weights: list[list[float]] = []
    for step in steps:
        by_rank = [
            [hook.number for name, hook in by_step.get(step, {}).items() if name in names] or [1.0] for by_step in hooks
        ]
        if any(map(_factors_differ, by_rank)):
            return False
        weights.append([factors[0] for factors in by_rank])
    return len(names) > 1 and any(map(_factors_differ, zip(*weights, strict=True)))


_FACTORS_APART = 0.01


def _factors_differ(factors: Sequence[float]) -> bool:
    return max(factors) - min(factors) > _FACTORS_APART * max(map(abs, factors))
