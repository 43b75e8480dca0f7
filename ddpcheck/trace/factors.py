"""Constant factors between gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import mul

from ddpcheck.findings.evidence.gradients import LEAST, LOOSEST_FIT, Difference
from ddpcheck.findings.evidence.script import OptimizerStep
from ddpcheck.stream.entries import ReplicaCaptured

SCALE_TOLERANCE = 1e-3  # relative rounding error of a factor
_RATIO_TOLERANCE = 0.01  # relative spread of the ratios of several gradients
_EXACT_SKETCH = 64  # elements of a gradient up to which its sketch has all of them, so that the norm is exact


def is_near(expected: float, value: float) -> bool:
    """Check if two numbers are equal within rounding."""
    return abs(expected - value) < SCALE_TOLERANCE * abs(expected)


def name_world_factor(world_size: int, fits: Callable[[float], bool]) -> str:
    """Return "N" or "1/N" (N: world size), whichever factor `fits` accepts, else ''."""
    return str(world_size) if fits(world_size) else f"1/{world_size}" if fits(1 / world_size) else ""


def constant_ratio(differences: Sequence[Difference]) -> float | None:
    """Return the factor common to all differences, or None."""
    ratios = [item.ratio for item in differences]
    if not ratios or any(item.residual > max(item.tolerance, LOOSEST_FIT * item.error) for item in differences):
        return None
    median = sorted(ratios)[len(ratios) // 2]
    spread = max(abs(ratio - median) for ratio in ratios)
    return median if spread <= _RATIO_TOLERANCE * abs(median) and median != 0.0 else None


def factor_of_average(steps: Sequence[OptimizerStep], grads: Mapping[str, Sequence[float]]) -> float:
    """Return the constant factor by which `grads` exceed averaged local gradients, or 0.0."""
    factors = []
    for name in grads.keys() & set.intersection(*(set(step.local) for step in steps)):
        average = [sum(values) / len(steps) for values in zip(*(step.local[name] for step in steps), strict=True)]
        if power := sum(map(mul, average, average)):
            factors.append(sum(map(mul, average, grads[name])) / power)
            if math.dist(grads[name], [factors[-1] * x for x in average]) > SCALE_TOLERANCE * math.hypot(*grads[name]):
                return 0.0
    return factors[0] if factors and all(is_near(factors[0], factor) for factor in factors) else 0.0


def factor_of_reduced(step: OptimizerStep, captured: ReplicaCaptured) -> float | None:
    """Return the factor from reduced gradients to the optimizer step's gradients, or None.

    None if the factor differs between parameters. Only small gradients are compared: their sketches have exact norms.
    """
    exact = {name: math.hypot(*sketch) for name, sketch in captured.averaged.items() if len(sketch) <= _EXACT_SKETCH}
    used = {name: step.norms.get(f"{captured.wrapper}/{name}", 0.0) for name in exact}
    factors = [used[name] / norm for name, norm in exact.items() if norm > LEAST and used[name] > 0]
    is_constant = bool(factors) and max(factors) - min(factors) <= SCALE_TOLERANCE * max(factors)
    return sum(factors) / len(factors) if is_constant else None


def sizes_of_groups(replicas: int, ranks_per_model: int) -> dict[int, str]:
    """Map group sizes to descriptions; scripts may multiply or divide losses by these sizes."""
    words = {replicas * ranks_per_model: "the world size"}
    if ranks_per_model > 1:
        words.setdefault(ranks_per_model, "the number of ranks that compute one model together")
        words.setdefault(replicas, "the number of models that are trained data parallel")
    return {size: text for size, text in words.items() if size > 1}
