"""Gradient errors against their tolerances, as a plot with one line a parameter, on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddpcheck.findings.report import ParityEntry
from ddpcheck.findings.wording import counted, group_by

_LEAST, _MOST_ERROR = 1e-12, 1e12  # on the scale
_REFERENCES = {
    "local": "Under DDP, against the average of the ranks' own gradients",
    "single-process": "The ranks' average, against the whole batch in a single process",
}


@dataclass(frozen=True, slots=True)
class Plot:
    """The gradients against one reference: of each parameter the step in which it is farthest away, worst first.

    `low` and `high` are the powers of ten between which the scale lies.
    """

    title: str
    said: str
    entries: Sequence[ParityEntry]
    low: int
    high: int

    @property
    def ticks(self) -> range:
        """The powers of ten that the scale names."""
        return range(self.low, self.high + 1, max(1, math.ceil((self.high - self.low) / 5)))

    def at(self, value: float) -> str:
        """The place of a value on the scale; zero is at its beginning, what is not finite at its end."""
        if value == 0:
            return "0%"
        place = (math.log10(max(value, _LEAST)) - self.low) / (self.high - self.low) if math.isfinite(value) else 1.0
        return f"{2 + 96 * min(max(place, 0.0), 1.0):.1f}%"


def plots(parity: Iterable[ParityEntry]) -> list[Plot]:
    """A plot for each reference."""
    groups = group_by(parity, lambda entry: entry.reference)
    return [_plot(reference, entries) for reference, entries in sorted(groups.items())]


def _plot(reference: str, entries: Sequence[ParityEntry]) -> Plot:
    by_name = group_by(entries, lambda entry: entry.parameter).values()
    farthest = (max(of_name, key=lambda one: (one.is_beyond, one.excess)) for of_name in by_name)
    worst = sorted(farthest, key=lambda one: (not one.is_beyond, -one.excess, one.parameter))
    beyond = sum(entry.is_beyond for entry in worst)
    steps = counted(len({entry.step for entry in entries}), "step")
    said = f"{counted(len(worst), 'parameter')} in {steps}: {beyond or 'none'} beyond the tolerance."
    values = [v for e in worst for v in (e.relative_error, e.tolerance) if math.isfinite(v) and v > 0]
    least, most = (min(max(one, _LEAST), _MOST_ERROR) for one in (min(values, default=1e-8), max(values, default=1.0)))
    low = math.floor(math.log10(least))
    high = max(math.ceil(math.log10(most)), low + 2)
    return Plot(_REFERENCES.get(reference, f"Against {reference}"), said, worst, low, high)
