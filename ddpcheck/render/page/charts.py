"""SVG chart of a metric on the ranks and in a single process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddpcheck.findings.figures import ParityCurve

_WIDTH, _HEIGHT = 440, 200
_LETTER = 6.5  # pixels per character
_FLAT = 1e-9  # relative; a smaller range is drawn as constant
_SMALLEST = 1e-100


@dataclass(frozen=True, slots=True)
class Axis:
    """Axis of the chart, from `start` to `end` in pixels."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    def ticks(self, least: float = 0.0) -> list[tuple[float, str]]:
        """Return (position, label) of round values, at least `least` apart."""
        rough = (self.high - self.low) / 6
        power = 10.0 ** math.floor(math.log10(rough))
        step = max(next(factor * power for factor in (1, 2, 5, 20) if factor * power >= rough), least)
        numbers = range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        return [(self.at(number * step), f"{number * step:.10g}") for number in numbers]


def _axis(values: Sequence[float], start: float, end: float) -> Axis:
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    if high - low <= max(_FLAT * size, _SMALLEST):
        margin = 0.1 * size if size > _SMALLEST else 1.0
        low, high = low - margin, high + margin
    return Axis(low, high, start, end)


def chart_view(curve: ParityCurve) -> dict[str, Any]:
    """Return the template variables of a chart."""
    values = [value for value in (*curve.ranks, *curve.single) if value is not None]
    y = _axis(values or [0.0], _HEIGHT - 38, 46)
    x_start = 12 + _LETTER * max(len(text) for _, text in y.ticks())
    positions = [*curve.x, *(position for position in (curve.diverges_at,) if position is not None)]
    x = _axis(positions or [0], x_start, _WIDTH - 12)
    mark = f"first divergence: {curve.x_label} {curve.diverges_at}"
    divergence = mark if curve.diverges_at is not None else "no divergence"
    return {
        "curve": curve,
        "mark": mark,
        "summary": f"{curve.name}, by {curve.x_label}, on the ranks and in a single process: {divergence}",
        "width": _WIDTH,
        "height": _HEIGHT,
        "x": x,
        "y": y,
        "single": _segments(x, y, curve.x, curve.single),
        "ranks": _segments(x, y, curve.x, curve.ranks),
        "lost": 2 * len(curve.x) - len(values),
    }


def _segments(x: Axis, y: Axis, places: Sequence[int], values: Sequence[float | None]) -> list[str]:
    """Return a curve as SVG points, split at missing values; single points become dashes."""
    segments = []
    for is_gap, pairs in itertools.groupby(zip(places, values, strict=True), lambda pair: pair[1] is None):
        points = [(x.at(position), y.at(value)) for position, value in pairs if value is not None]
        if not is_gap:
            points = points if len(points) > 1 else [(points[0][0] + dx, points[0][1]) for dx in (-2, 2)]
            segments.append(" ".join(f"{x_pixel},{y_pixel}" for x_pixel, y_pixel in points))
    return segments
