"""Gradient errors against their tolerances, as a plot with one line a parameter, on a logarithmic scale.

This module is light: it never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ddpcheck.findings.report import ParityEntry
from ddpcheck.findings.wording import counted, group_by
from ddpcheck.render.page.frame import Content, Markup, brief, code, folded, mark, table, tag

_MOST = 24  # lines of a plot
_NAME = 44  # letters of a name
_MOST_ROWS = 300  # of a table
_LEAST, _MOST_ERROR = 1e-12, 1e12  # on the scale
_REFERENCES = {
    "local": "Under DDP, against the average of the ranks' own gradients",
    "single-process": "The ranks' average, against the whole batch in a single process",
}


def gradients(parity: Sequence[ParityEntry]) -> Content:
    """A plot for each reference, of each parameter the step in which it is farthest away."""
    groups = group_by(parity, lambda entry: entry.reference)
    return [_of_reference(reference, entries) for reference, entries in sorted(groups.items())]


def _of_reference(reference: str, entries: Sequence[ParityEntry]) -> Content:
    by_name = group_by(entries, lambda entry: entry.parameter).values()
    farthest = (max(of_name, key=lambda one: (one.is_beyond, one.excess)) for of_name in by_name)
    worst = sorted(farthest, key=lambda one: (not one.is_beyond, -one.excess, one.parameter))
    beyond = sum(entry.is_beyond for entry in worst)
    steps = counted(len({entry.step for entry in entries}), "step")
    said = f"{counted(len(worst), 'parameter')} in {steps}: {beyond or 'none'} beyond the tolerance."
    low, high = _range(worst)
    lines = [_line(entry, low, high) for entry in worst[:_MOST]]
    rest = worst[_MOST:]
    plot = tag("div", _axis(low, high), lines, class_="plot", role="img", aria_label=f"{_title(reference)}: {said}")
    parts: list[Content] = [tag("h3", _title(reference)), tag("p", said, class_="muted"), plot]
    if rest:
        worst_left = f"and {counted(len(rest), 'more parameter')}, the farthest of them at {rest[0].excess:.2g} times "
        parts.append(tag("p", f"{worst_left}its tolerance", class_="muted"))
    shown = [_row(entry) for entry in worst[:_MOST_ROWS]]
    caption = "Relative error: Frobenius norm of the difference, relative to the scale of the reference"
    headings = ("parameter", "worst step", "relative error", "allowed", "norm of the reference", "elements")
    more = f", the first {_MOST_ROWS}" if len(worst) > _MOST_ROWS else ""
    parts.append(folded(f"The numbers{more}", table(headings, shown, caption)))
    return parts


def _title(reference: str) -> str:
    return _REFERENCES.get(reference, f"Against {reference}")


def _range(entries: Iterable[ParityEntry]) -> tuple[int, int]:
    """The powers of ten between which the plot lies."""
    values = [v for e in entries for v in (e.relative_error, e.tolerance) if math.isfinite(v) and v > 0]
    least, most = (min(max(one, _LEAST), _MOST_ERROR) for one in (min(values, default=1e-8), max(values, default=1.0)))
    floor = math.floor(math.log10(least))
    return floor, max(math.ceil(math.log10(most)), floor + 2)


def _at(value: float, low: int, high: int) -> str:
    """The place of a value on the scale; zero is at its beginning, what is not finite at its end."""
    if value == 0:
        return "0%"
    place = (math.log10(max(value, _LEAST)) - low) / (high - low) if math.isfinite(value) else 1.0
    return f"{2 + 96 * min(max(place, 0.0), 1.0):.1f}%"


def _line(entry: ParityEntry, low: int, high: int) -> list[Content]:
    beyond = entry.is_beyond
    middle = "50%"
    drawn = tag(
        "svg",
        tag("line", x1="0%", x2="100%", y1=middle, y2=middle, class_="rail"),
        _tolerance(_at(entry.tolerance, low, high)),
        tag("circle", cx=_at(entry.relative_error, low, high), cy=middle, r=4.5, class_="beyond" if beyond else "held"),
        aria_hidden="true",
    )
    number = [
        tag("span", [mark("cross"), " "] if beyond else "", class_="error"),
        f"{_brief(entry.relative_error)} / {_brief(entry.tolerance)}",
    ]
    return [tag("span", brief(entry.parameter, _NAME)), tag("span", drawn), tag("span", number)]


def _brief(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _tolerance(at: str) -> Markup:
    return tag("line", x1=at, x2=at, y1="12%", y2="88%", class_="allowed")


def _axis(low: int, high: int) -> list[Content]:
    every = max(1, math.ceil((high - low) / 5))
    ticks = [
        tag(
            "text",
            f"1e{power}",
            x=_at(10.0**power, low, high),
            y="80%",
            text_anchor=_anchor(power, low, high),
            class_="small",
        )
        for power in range(low, high + 1, every)
    ]
    return [
        tag("span", "parameter (● error, | tolerance)", class_="axis"),
        tag("span", tag("svg", ticks, aria_hidden="true")),
        tag("span", "error / allowed", class_="axis"),
    ]


def _anchor(power: int, low: int, high: int) -> str:
    return "start" if power == low else "end" if power == high else "middle"


def _row(entry: ParityEntry) -> list[Content]:
    numbers = (f"{entry.relative_error:.3e}", f"{entry.tolerance:.3e}", f"{entry.reference_norm:.3e}")
    cells = (*numbers, f"{entry.elements:,}")
    return [code(entry.parameter), str(entry.step), *(tag("span", number, class_="nobr") for number in cells)]
