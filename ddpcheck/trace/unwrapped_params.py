"""Optimizer steps on parameters outside of wrappers, compared between ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from ddpcheck.findings.evidence.gradients import LEAST, relative
from ddpcheck.findings.evidence.script import OptimizerStep
from ddpcheck.findings.wording import minority_ranks

_TOLERANCE = 1e-3  # relative rounding tolerance of norms and sketches
MIN_TAKEN_STEPS = 3  # recorded calls of torch.autograd.grad
VALUES_DIVERGED = "the values were the same on all ranks in the first step of the optimizer, and are not in the last"
Steps = Sequence[OptimizerStep]  # an optimizer before one step, by rank


def names_differing(values: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the names whose values differ between ranks beyond rounding."""
    names = list(dict.fromkeys(name for rank_values in values for name in rank_values))
    return [name for name in names if not are_close([rank_values.get(name) for rank_values in values])]


def are_close(values: Sequence[float | None]) -> bool:
    """Check if ranks' values agree within rounding; True if one overflowed, as under `GradScaler`."""
    numbers = [value for value in values if value is not None]
    if any(not math.isfinite(value) for value in numbers):
        return True  # GradScaler skips the step on overflow
    if len(numbers) < len(values):
        return not numbers or max(numbers) <= LEAST
    return relative(max(numbers) - min(numbers), max(numbers)) <= _TOLERANCE


def is_equal(steps: Steps, name: str) -> bool:
    """Check if an unwrapped parameter has the same value on all ranks."""
    return len({entry.local_params.get(name) for entry in steps}) == 1


def gradients_differ(steps: Steps, name: str) -> bool:
    """Check if an unwrapped parameter has different gradients on the ranks."""
    return all(name in entry.gradients for entry in steps) and not are_near([e.gradients[name] for e in steps])


def gradients_agree(steps: Steps, name: str) -> bool:
    """Check if an unwrapped parameter has the same nonzero gradient on all ranks."""
    return any(steps[0].gradients.get(name, ())) and is_averaged([steps], name)


def is_averaged(steps: Sequence[Steps], name: str) -> bool:
    """Check if ranks have equal gradients in each step, nonzero in some step.

    The gradient may be zero in the first step if a later layer is zero-initialized.
    """
    sketches = [[entry.gradients.get(name, ()) for entry in step] for step in steps]
    return all(all(row) and are_near(row) for row in sketches) and any(any(row[0]) for row in sketches)


def are_near(sketches: Sequence[Sequence[float]]) -> bool:
    """Check if gradient sketches agree within rounding."""
    first, *others = sketches
    scale = max(math.hypot(*sketch) for sketch in sketches)
    return all(relative(math.dist(first, sketch), scale) <= _TOLERANCE for sketch in others)


def names_scaled(names: Sequence[str], steps: Steps) -> list[str]:
    """Return names whose gradients are equal after division by one factor per rank."""
    sketches = {name: [entry.gradients.get(name, ()) for entry in steps] for name in names}
    norms = {name: [math.hypot(*sketch) for sketch in by_rank] for name, by_rank in sketches.items()}
    factors = [[norm / by_rank[0] for norm in by_rank] for by_rank in norms.values() if min(by_rank) > LEAST]
    median_factors = [*map(median, zip(*factors, strict=True))]
    return [
        name
        for name, by_rank in sketches.items()
        if median_factors
        and are_near([[x / factor for x in sketch] for sketch, factor in zip(by_rank, median_factors, strict=True)])
    ]


def all_gradients_agree(steps: Steps) -> bool:
    """Check if all gradients of an optimizer step agree between ranks."""
    return bool(steps[0].norms or steps[0].gradients) and not any_gradient_differs(steps)


def any_gradient_differs(steps: Steps) -> bool:
    """Check if any gradient of an optimizer step differs between ranks."""
    differs = any(gradients_differ(steps, name) for name in steps[0].local_params)
    return differs or bool(names_differing([entry.norms for entry in steps]))


def minority_of(values: Sequence[Mapping[str, float]], names: Sequence[str]) -> tuple[int, ...]:
    """Return ranks whose values of `names` differ from the majority; () for two ranks."""
    by_rank = [[(name, rank_values.get(name)) for name in names] for rank_values in values]
    rounded = [tuple((n, f"{value:.3g}") for n, value in rank_values if value is not None) for rank_values in by_rank]
    return minority_ranks(rounded) if len(values) > 2 else ()


def format_norm(value: float | None, nothing: str = "no gradient") -> str:
    """Format a norm, or return `nothing` for None."""
    return nothing if value is None else f"{value:.6g}"


def param_name(name: str) -> str:
    """Strip the wrapper number from a parameter name."""
    return name.partition("/")[2] or name


def are_local(steps: Sequence[Steps]) -> bool:
    """Check if an optimizer holds only unwrapped parameters with rank-local gradients."""
    return not steps[0][0].ddp_params and gradients_mostly_differ(steps)


def train_separately(optimizers: Sequence[Sequence[Steps]]) -> bool:
    """Check if each rank trains a separate model: different initial values and gradients."""
    stepped = [steps for steps in optimizers if steps]
    return bool(stepped) and all(are_local(steps) and not params_equal(steps[0]) for steps in stepped)


def params_equal(steps: Steps) -> bool:
    """Check if all unwrapped parameters are equal on all ranks."""
    return all(entry.local_params == steps[0].local_params for entry in steps)


def gradients_mostly_differ(steps: Sequence[Steps]) -> bool:
    """Check if gradients differ between ranks in most of the steps."""
    names = steps[0][0].local_params
    differs = [any(gradients_differ(step, name) for name in names) for step in steps]
    return sum(differs) * 2 > len(steps)
