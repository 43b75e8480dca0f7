"""Figures as text: a table for the terminal, and the page with what they mean."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks.wrapper.cases import CASES
from benchmarks.wrapper.figures import CPU, LIMIT, WALL, Estimate, Measured, Record

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks-wrapper.md"
_HEAD = ("", "plain DDP: ms", "checked", "CPU", "own code: us", "of a step", "first 32", "unused", "mmengine", "again")


def for_terminal(record: Record) -> str:
    """Everything, with a legend."""
    rows = [_HEAD, *(_cells(one) for one in record.measurements)]
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(len(_HEAD))]
    lines = []
    for title, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=False)]
        lines.append("  ".join([title.ljust(widths[0]), *padded]))
    lines += ["", *_LEGEND, "", f"{_AIM}:", *(f"  {aim}" for aim in _aims(record))]
    return "\n".join(line.rstrip() for line in lines) + "\n"


_AIM = f"at most {LIMIT:g} % of a step, and less than find_unused_parameters"


_LEGEND = (
    "per cent: increase over a step of plain DDP in the same turn, wall time, median and 95 % interval",
    "CPU: the same for the training thread; own code: processor time in ddpcheck per step; again: a second plain DDP",
)


def _aims(record: Record) -> list[str]:
    return [f"{CASES[one.case].title}: {one.verdict() if one.ranks else one.problem}" for one in record.measurements]


def _cells(one: Measured) -> tuple[str, ...]:
    title = CASES[one.case].title
    if not one.ranks:
        return title, one.problem
    return (
        title,
        f"{one.step(WALL) * 1e3:.3g}",
        _percent(one.extra("checked", WALL)),
        _percent(one.extra("checked", CPU), interval=False),
        f"{one.own(CPU) * 1e6:.0f}",
        f"{100 * one.own(CPU) / one.step(WALL):.2g} %",
        "-" if one.first(WALL) is None else f"{one.first(WALL):+.1f} %",
        *(_percent(one.extra(name, WALL)) for name in ("unused", "mmengine", "second")),
    )


def _percent(found: Estimate | None, *, interval: bool = True) -> str:
    if found is None:
        return "-"
    return f"{found.value:+.1f} ({found.low:+.1f} to {found.high:+.1f}) %" if interval else f"{found.value:+.1f} %"


_TOP = """\
<!-- Written by `python -m benchmarks.wrapper --write`. -->
# Cost of a healthy step of the wrapper

`CheckedDistributedDataParallel(model, detect_anomalous_params=True)` compared with plain `DistributedDataParallel`,
`find_unused_parameters=True`, and the detector of mmengine's `MMDistributedDataParallel`, on two ranks under gloo, on
CPU, {how}.

"""
_MEANING = """
## What is measured

- **A step** is `zero_grad`, forward, backward and the step of an SGD optimizer, on a small batch (8 samples, unless
  another number is given), so that a step is short, and ddpcheck's share of it large. Models are chains of linear
  layers with a residual connection around each, and one transformer encoder. Each rank has one thread.
- **Turns.** In each turn every alternative makes one step, in a random order that is the same on both ranks, after a
  barrier. Percentages compare with the plain step of the same turn, so that other load affects all equally. The wall
  time of a step is that of the slower rank. Medians over {turns} turns; the interval, by order statistics, holds the
  true median in 95 of 100 runs.
- **checked** is the same wrapper, in the same memory, as the plain one: its hooks are added for the step and removed
  after it. mmengine's detector runs after the optimizer's step, as in its `train_step`, on the same wrapper.
  `find_unused_parameters` needs another wrapper, so **again** is a second plain one, for the difference between copies.
- **own code** is the processor time that a step spends in ddpcheck, measured in place, including its queries to torch
  but not torch's overhead of calling a hook. If a step takes seconds, use this column: the times of whole steps vary by
  more.
- **Steady state** is shown by all columns but one: a query to the autograd engine in each step, and one to the store in
  every 16th. **first 32** are the first 32 rounds of a new watch: the store is read after each, and rounds 0, 1, 2, 4,
  8 and 16 are checked thoroughly, with a hook on each parameter and a walk of the graph. Later thorough checks, at 32,
  64, 128 and so on, become proportionally rarer.
- mmengine's detector recurses for each node of the graph, and raises `RecursionError` if a graph is deeper than Python
  allows; this program raises that limit so that it can be measured.

## Again

```sh
python -m benchmarks.wrapper --write                     # everything, on an idle machine, and this page
python -m benchmarks.wrapper --quick                     # one model, briefly: no figures to quote
python -m benchmarks.wrapper --only many-1 --json run.json
```
"""


def for_page(record: Record) -> str:
    """The page of the documentation."""
    about = record.surroundings
    how = f"{about['cores']} cores, {about['system']}, Python {about['python']}, torch {about['torch']}"
    turns = [one.turns for one in record.measurements if one.ranks]
    lines = [_row(_HEAD), _row(["---", *["---:"] * (len(_HEAD) - 1)])]
    lines += [_row([*cells, *[""] * (len(_HEAD) - len(cells))]) for cells in map(_cells, record.measurements)]
    lines += [
        "",
        *_LEGEND,
        "",
        "## Aim\n",
        f"The wall time of a step: {_AIM}.\n",
        *(f"- {aim}" for aim in _aims(record)),
    ]
    spread = f"{min(turns)} to {max(turns)}" if turns else "no"
    return _TOP.format(how=how) + "\n".join(lines) + "\n" + _MEANING.format(turns=spread)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
