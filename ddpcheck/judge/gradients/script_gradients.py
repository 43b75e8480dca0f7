"""Comparisons of what optimizers are given on the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.script import OptimizerStep
from ddpcheck.findings.wording import minority_ranks

_TOLERANCE = 1e-3  # relative, of norms and sketches that are equal but for rounding

Steps = Sequence[OptimizerStep]
"""One optimizer before one of its steps, by rank."""


def differing(values: Sequence[Mapping[str, float]]) -> list[str]:
    """The names under which not all ranks have the same number, but for rounding."""
    names = list(dict.fromkeys(name for of_rank in values for name in of_rank))
    return [name for name in names if not are_close([of_rank.get(name) for of_rank in values])]


def are_close(values: Sequence[float | None]) -> bool:
    """Whether the ranks have the same number, but for rounding; also where one has overflown."""
    known = [value for value in values if value is not None]
    if any(not math.isfinite(value) for value in known):
        return True  # an overflow, which a gradient scaler skips
    if len(known) < len(values):
        return not known or max(known) == 0.0
    return max(known) - min(known) <= _TOLERANCE * max(known)


def gradients_differ(steps: Steps, name: str) -> bool:
    """Whether all ranks have a gradient of a parameter in no wrapper, and not the same one."""
    there = [one.gradients[name] for one in steps if name in one.gradients]
    return len(there) == len(steps) and not are_near(there)


def gradients_agree(steps: Steps, name: str) -> bool:
    """Whether all ranks have the same gradient of a parameter in no wrapper, which is not zero."""
    there = [one.gradients[name] for one in steps if name in one.gradients]
    return len(there) == len(steps) and are_near(there) and any(there[0])


def are_near(sketches: Sequence[Sequence[float]]) -> bool:
    """Whether sketches are of the same gradient."""
    first, *others = sketches
    scale = max(math.hypot(*sketch) for sketch in sketches)
    return all(math.dist(first, other) <= _TOLERANCE * scale for other in others)


def all_gradients_agree(steps: Steps) -> bool:
    """Whether every gradient that an optimizer is about to use is the same on all ranks."""
    return bool(steps[0].norms or steps[0].gradients) and not any_gradient_differs(steps)


def any_gradient_differs(steps: Steps) -> bool:
    """Whether a gradient that an optimizer is about to use is another one on some ranks."""
    named = any(gradients_differ(steps, name) for name in steps[0].alone)
    return named or bool(differing([one.norms for one in steps]))


# Words


def minority_of(values: Sequence[Mapping[str, float]], names: Sequence[str]) -> tuple[int, ...]:
    """The ranks that are not like most; none of two, of which either may be right."""
    if len(values) < 3:
        return ()
    return minority_ranks([tuple(_rounded(of_rank.get(name)) for name in names) for of_rank in values])


def _rounded(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def spelled(value: float | None, nothing: str = "no gradient") -> str:
    """A norm in words."""
    return nothing if value is None else f"{value:.6g}"


def short(name: str) -> str:
    """A name without the number of its wrapper."""
    return name.partition("/")[2] or name
