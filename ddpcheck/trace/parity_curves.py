"""Curves of metrics on the ranks and in a single process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from ddpcheck.findings.evidence.parity import NumbersShown, ParityStep
from ddpcheck.findings.figures import LARGEST_VALUE, Location, ParityCurve
from ddpcheck.findings.wording import group_by
from ddpcheck.trace.divergences import Parity
from ddpcheck.trace.parity import Quantity

MOST_CURVES = 6
MOST_POINTS = 200
_FEWEST_POINTS = 2
_LONGEST_NAME = 40
_STEPS = "optimizer step"


def curves(parity: Parity) -> tuple[ParityCurve, ...]:
    """Return curves of gradients, losses and evaluation numbers, earliest divergence first."""
    all_curves = [*_step_curves(parity), *_number_curves(parity)]
    all_curves.sort(key=lambda curve: (curve.diverges_at is None, curve.diverges_at or 0))
    return tuple(curve for curve in all_curves if len(curve.x) >= _FEWEST_POINTS)[:MOST_CURVES]


def _step_curves(parity: Parity) -> Iterator[ParityCurve]:
    """Yield gradient and loss curves; mark where losses diverge only if gradients diverge."""
    pairs = zip(parity.steps, parity.gradients, strict=True)
    by_optimizer = group_by(pairs, lambda pair: pair[0][1].optimizer)
    for number, group in by_optimizer.items():
        suffix = f" of optimizer {number}" if len(by_optimizer) > 1 else ""
        steps, sizes = [step for step, _ in group], [(step[1].count, size) for step, size in group]
        first = steps[0][0][0]
        yield _make_curve(f"norm of the gradients{suffix}", _STEPS, sizes, first.location)
        is_marked = any(size.differs for _, size in sizes)
        name = f"loss{suffix}, mean over the ranks"
        yield _make_curve(name, _STEPS, _loss_points(steps), first.loss_at or first.location, is_marked=is_marked)


def _loss_points(steps: Sequence[tuple[list[ParityStep], ParityStep, ParityStep | None]]) -> list[tuple[int, Quantity]]:
    """Return mean losses by step; differences are relative to the largest loss."""
    points = []
    for rank_steps, single, noise in steps:
        if single.losses and all(rank_step.losses for rank_step in rank_steps):
            expected, noisy = _mean(single.losses), _mean(noise.losses if noise and noise.losses else single.losses)
            points.append((single.count, _mean([_mean(rank_step.losses) for rank_step in rank_steps]), expected, noisy))
    scale = max((abs(n) for _, *losses in points for n in losses if math.isfinite(n)), default=0.0) or 1.0
    quantities, largest = [], 0.0
    for step, actual, expected, noisy in points:
        largest = max(largest, _distance(expected, noisy) / scale)
        quantities.append((step, Quantity(actual, expected, _distance(actual, expected) / scale, largest)))
    return quantities


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _distance(number: float, reference: float) -> float:
    return 0.0 if number == reference or (math.isnan(number) and math.isnan(reference)) else abs(number - reference)


def _number_curves(parity: Parity) -> Iterator[ParityCurve]:
    if not parity.has_same_samples:
        return
    shown = (number for number in parity.shown if number.entry.evaluates and not number.entry.during)
    by_line = group_by(shown, lambda number: (number.entry.location, number.entry.how, number.entry.text, number.index))
    for (location, _, _, index), numbers in by_line.items():
        numbers = [number for number in numbers if not number.is_local]
        steps = [number.entry.steps for number in numbers]
        label, x = (_STEPS, steps) if len({*steps}) == len(steps) else ("time shown", range(1, len(steps) + 1))
        points = [(position, number.quantity) for position, number in zip(x, numbers, strict=True)]
        is_counter = _is_counter([number.text for number in numbers])
        if any(quantity.differs for _, quantity in points) or (points and not is_counter):
            yield _make_curve(_name_of_number(numbers[0].entry, index), label, points, location)


def _is_counter(texts: Sequence[str]) -> bool:
    numbers = [int(text) for text in texts if text.isdecimal()]
    return len(numbers) == len(texts) and len({b - a for a, b in itertools.pairwise(numbers)}) == 1


def _name_of_number(entry: NumbersShown, index: int) -> str:
    """Name a number by the text before it in its line: "printed: val loss"."""
    prefix = entry.text.split("#")[index].rpartition("\n")[2].strip(" \t\r=:,;|/([{}])'\"")
    return f"{entry.how}: {prefix[-_LONGEST_NAME:].strip() or f'number {index + 1}'}"


def _make_curve(
    name: str, label: str, points: Sequence[tuple[int, Quantity]], location: Location | None, *, is_marked: bool = True
) -> ParityCurve:
    first = next((n for n, (_, quantity) in enumerate(points) if quantity.differs), None) if is_marked else None
    drawn_points = [points[n] for n in _drawn_indices(len(points), first)]
    return ParityCurve(
        name,
        label,
        tuple(x for x, _ in drawn_points),
        tuple(_drawable(quantity.ranks) for _, quantity in drawn_points),
        tuple(_drawable(quantity.single) for _, quantity in drawn_points),
        None if first is None else points[first][0],
        location,
    )


def _drawn_indices(size: int, first: int | None) -> Sequence[int]:
    """Return indices of the points to draw, evenly spaced; add `first`, where curves diverge."""
    if size <= MOST_POINTS:
        return range(size)
    even = {round(n * (size - 1) / (MOST_POINTS - 2)) for n in range(MOST_POINTS - 1)}
    return sorted(even if first is None else even | {first})


def _drawable(value: float) -> float | None:
    return value if abs(value) < LARGEST_VALUE else None
