"""Curves of a script on its ranks and in a single process, for reports."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from ddpcheck.findings.evidence.parity import NumbersShown, ParityStep
from ddpcheck.findings.figures import LARGEST_VALUE, Location, ParityCurve
from ddpcheck.findings.wording import group_by
from ddpcheck.judge.parity_comparison import Comparison, Quantity, gradients, shown_numbers

MOST_CURVES = 6
MOST_POINTS = 200
_FEWEST_POINTS = 2
_LONGEST_NAME = 40
_STEPS = "optimizer step"


def curves(comparison: Comparison) -> tuple[ParityCurve, ...]:
    """Return curves of gradients, losses and evaluation numbers, earliest divergence first."""
    found = [*_of_steps(comparison), *_of_shown(comparison)]
    found.sort(key=lambda one: (one.diverges_at is None, one.diverges_at or 0))
    return tuple(one for one in found if len(one.x) >= _FEWEST_POINTS)[:MOST_CURVES]


def _of_steps(comparison: Comparison) -> Iterator[ParityCurve]:
    """Yield gradient and loss curves; losses are marked only if gradients differ."""
    every = zip(comparison.steps(), gradients(comparison), strict=True)
    by_optimizer = group_by(every, lambda one: one[0][1].optimizer)
    for number, some in by_optimizer.items():
        of_which = f" of optimizer {number}" if len(by_optimizer) > 1 else ""
        steps, sizes = [step for step, _ in some], [(step[1].count, size) for step, size in some]
        first = steps[0][0][0]
        yield _curve(f"norm of the gradients{of_which}", _STEPS, sizes, first.location)
        is_marked = any(size.differs for _, size in sizes)
        name = f"loss{of_which}, mean over the ranks"
        yield _curve(name, _STEPS, _losses(steps), first.loss_at or first.location, is_marked=is_marked)


def _losses(steps: Sequence[tuple[list[ParityStep], ParityStep, ParityStep | None]]) -> list[tuple[int, Quantity]]:
    """Return mean losses by step, compared relative to the largest loss."""
    points = []
    for of_ranks, single, noise in steps:
        if single.losses and all(one.losses for one in of_ranks):
            alone, again = _mean(single.losses), _mean(noise.losses if noise and noise.losses else single.losses)
            points.append((single.count, _mean([_mean(one.losses) for one in of_ranks]), alone, again))
    scale = max((abs(n) for _, *some in points for n in some if math.isfinite(n)), default=0.0) or 1.0
    found, largest = [], 0.0
    for step, theirs, alone, again in points:
        largest = max(largest, _apart(alone, again) / scale)
        found.append((step, Quantity(theirs, alone, _apart(theirs, alone) / scale, largest)))
    return found


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _apart(number: float, other: float) -> float:
    return 0.0 if number == other or (math.isnan(number) and math.isnan(other)) else abs(number - other)


def _of_shown(comparison: Comparison) -> Iterator[ParityCurve]:
    """Yield curves of numbers shown after evaluations."""
    if not comparison.has_same_samples:
        return
    every = (one for one in shown_numbers(comparison) if one.entry.evaluates and not one.entry.during)
    by_line = group_by(every, lambda one: (one.entry.location, one.entry.how, one.entry.text, one.place))
    for (where, _, _, place), some in by_line.items():
        some = [one for one in some if not one.is_local]
        steps = [one.entry.steps for one in some]
        label, x = (_STEPS, steps) if len({*steps}) == len(steps) else ("time shown", range(1, len(steps) + 1))
        points = [(at, one.quantity) for at, one in zip(x, some, strict=True)]
        is_counter = _is_counter([one.entry.numbers[place] for one in some])
        if any(one.differs for _, one in points) or (points and not is_counter):
            yield _curve(_name(some[0].entry, place), label, points, where)


def _is_counter(texts: Sequence[str]) -> bool:
    """Check if integers grow by a constant amount, as epoch numbers do."""
    numbers = [int(text) for text in texts if text.isdecimal()]
    return len(numbers) == len(texts) and len({b - a for a, b in itertools.pairwise(numbers)}) == 1


def _name(entry: NumbersShown, place: int) -> str:
    """Return the text before a number in its line."""
    before = entry.text.split("#")[place].rpartition("\n")[2].strip(" \t\r=:,;|/([{}])'\"")
    return f"{entry.how}: {before[-_LONGEST_NAME:].strip() or f'number {place + 1}'}"


def _curve(
    name: str,
    label: str,
    points: Sequence[tuple[int, Quantity]],
    location: Location | None,
    *,
    is_marked: bool = True,
) -> ParityCurve:
    first = next((n for n, (_, one) in enumerate(points) if one.differs), None) if is_marked else None
    kept = [points[n] for n in _thinned(len(points), first)]
    return ParityCurve(
        name,
        label,
        tuple(x for x, _ in kept),
        tuple(_drawn(one.ranks) for _, one in kept),
        tuple(_drawn(one.single) for _, one in kept),
        None if first is None else points[first][0],
        location,
    )


def _thinned(size: int, first: int | None) -> Sequence[int]:
    """Return the indices of drawn points: evenly spaced, plus the first divergence."""
    if size <= MOST_POINTS:
        return range(size)
    even = {round(n * (size - 1) / (MOST_POINTS - 2)) for n in range(MOST_POINTS - 1)}
    return sorted(even if first is None else even | {first})


def _drawn(value: float) -> float | None:
    return value if abs(value) < LARGEST_VALUE else None
