"""Figures as text: a table for the terminal and for the page, and what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.harnesses.catalogue import CATALOGUE, FLOOR, OURS
from benchmarks.harnesses.figures import Measured, aims, ratio
from benchmarks.harnesses.record import Record

WIDTH = 120
_HEAD = (
    f"{'':<28}{'one test: a session':>27}  {'each further test':>20}  {'times ddp_world':>17}  {'times the floor':>17}",
    f"{'':<28}{'wall s':>8}{'CPU s':>8}{'peak MiB':>11}  {'wall ms':>10}{'CPU ms':>10}"
    f"  {'wall':>8}{'CPU':>9}  {'wall':>8}{'CPU':>9}",
)
_SIZES = {0: "without ranks", 1: "1 rank"}


def for_terminal(record: Record) -> str:
    """Everything in at most 120 columns."""
    lines = []
    for size, group in _by_size(record):
        lines += [f"{_SIZES.get(size, f'{size} ranks'):<28}{_HEAD[0][28:]}", _HEAD[1], "-" * WIDTH]
        for each in group:
            name = f"{CATALOGUE[each.row].title:<28}"
            if each.problem and not each.first:
                lines.append(f"{name}  {each.problem}")
                continue
            wall, cpu, peak, more_wall, more_cpu, *ratios = _cells(each, record)
            lines.append(
                f"{name}{wall:>8}{cpu:>8}{peak:>11}  {more_wall:>10}{more_cpu:>10}"
                + "".join(f"  {one:>8}{two:>9}" for one, two in (ratios[:2], ratios[2:]))
            )
            if each.problem:
                lines.append(f"  until it stopped: {each.problem}")
        lines.append("")
    lines.append("aims")
    for text, limit, value, verdict in _aims(record):
        lines += [f"  {text}", f"    {value}, aim: {limit}: {verdict}"]
    lines += ["", _how(record)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _cells(each: Measured, record: Record) -> list[str]:
    def beside(key: str) -> Iterator[str]:
        base = record.measurements.get((key, each.world_size))
        mine, theirs = each.further, base and base.further
        for what in ("wall", "cpu"):
            yield _number(ratio(mine and getattr(mine, what), theirs and getattr(theirs, what)))

    further = each.further
    return [
        _number(each.cold and each.cold.wall),
        _number(each.cold and each.cold.cpu),
        f"{each.memory.total / 2**20:,.0f}" if each.memory else "-",
        _number(further and further.wall * 1e3),
        _number(further and further.cpu * 1e3),
        *beside(OURS),
        *beside(FLOOR),
    ]


def _number(value: float | None) -> str:
    """Three digits, for no more of them mean anything."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _by_size(record: Record) -> Iterator[tuple[int, list[Measured]]]:
    for size in sorted({size for _, size in record.measurements}):
        yield size, [each for each in record.measurements.values() if each.world_size == size]


def _aims(record: Record) -> Iterator[tuple[str, str, str, str]]:
    for aim in aims(record.measurements):
        value = "-" if aim.value is None else f"{_number(aim.value)} {aim.unit}"
        if aim.range is not None and aim.range[0] < aim.range[1]:
            value += f" ({_number(aim.range[0])} to {_number(aim.range[1])})"
        yield aim.text, f"at {'least' if aim.at_least else 'most'} {aim.limit:g} {aim.unit}", value, aim.verdict


def _how(record: Record) -> str:
    about = record.surroundings
    lengths = sorted({each.tests for each in record.measurements.values() if each.tests > 1})
    return (
        f"Medians of {record.repetitions} interleaved repetitions, sessions of 1 and of {_listed(map(str, lengths))} "
        f"tests.\n{about['cores']} cores, {about['system']}, Python {about['python']}, torch {about['torch']}, "
        f"pytest {about['pytest']}."
    )


def _listed(words: Iterable[str]) -> str:
    *most, last = [*words] or ["no"]
    return f"{', '.join(most)} or {last}" if most else last


PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
_TOP = """\
<!-- Written by `make bench`. -->
# Cost of a distributed test

This page compares `ddp_world` with other ways to test distributed PyTorch code, on one machine in one run. Every row
does the same work: W processes, a gloo process group, one all-reduce whose result is checked on every rank, and an
orderly exit. **Compare the ratios**: the seconds are those of one machine, and the ratios are similar on others.

{how}
"""
_MEANING = """
## What is measured

- **wall s** is the time of a session with a single test: the whole of `pytest -q FILE`, with a file that imports torch
  at its top. All files have been read before, so the disk does not count.
- **further** is the time of each further test, (T(N) - T(1)) / (N - 1). N is 3 if a test takes seconds, and 51 or 201
  if it takes milliseconds.
- **CPU** is that of the session and of every process that it has started, including those that outlived their parent:
  the benchmark waits for them.
- **Peak MiB** is the highest sum over all processes of a session of their proportional set size, in which a page that n
  processes share counts 1/n in each. It is measured in a separate session, which is not timed: its ranks stay
  alive for half a second, so that none is missed. It is too low if other programs use the same torch.
- Rows are measured in turns (A, B, C, and again A, B, C), each session of N tests right after the one of a single test,
  and each figure is the median over the turns, so that other load on the machine affects all rows equally. Every
  process has one OpenMP thread, pytest loads only the plugin that the row needs, and gloo uses the loopback interface.

## How to read the figures

- **`MultiThreadedTestCase` is cheaper than `ddp_world`, but not equivalent.** Its ranks are threads of one process, and
  its collectives are simulated in the memory of that process: there is no gloo and no second process, and ranks share
  every global of Python and of torch. It cannot detect faults in any of these.
- **Harnesses that keep their ranks are cheaper for each further test than those that start fresh ones.**
  `MultiProcContinuousTest` keeps the ranks and the process group of a class: state that a test leaves behind affects
  the next one, and after a failure the rest of the class is skipped. A `ddpcheck.World` that is kept open shares state
  in the same way, and ends with its first failure. `ddp_world` with reuse keeps the ranks of a module, creates a
  process group for each test, and starts fresh ranks after a failure.
- **The floor is not a harness.** It forks from a process that has imported torch, and checks exit codes: no deadline,
  no output, no result and no traceback of a rank, and the parent must never have used a thread. It also runs without
  pytest. A harness with fresh ranks can be faster only by preparing them while another test runs.
- **One all-reduce shows the harness alone.** A test that trains for a second takes a second more in every row, and the
  ratios get closer to 1.
- **With a single test, every row pays for importing torch.** `ddp_world` pays for it twice in CPU time, once in the
  test file and once in its fork server; ranks share the latter, and harnesses that spawn pay once more for each rank.
- **DeepSpeed's row is a stand-in** for the way in which its tests start ranks; `benchmarks/harnesses/rows/pooled.py`
  names the source. The half second that the original sleeps after each test is omitted, in its favour. The
  other rows use the original harness of torch.

## Again

```sh
make bench                                                   # everything, and this page
python -m benchmarks.harnesses --quick                       # fewer and shorter: no figures to quote
python -m benchmarks.harnesses --only fixture spawned --ranks 2 --json figures.json
```
"""


def for_page(record: Record) -> str:
    """The page of the documentation."""
    lines = [_TOP.format(how=_how(record).replace("\n", " "))]
    for size, group in _by_size(record):
        ratios = size > 1
        head = ["", "wall s", "CPU s", "peak MiB", "further: wall ms", "CPU ms"]
        if ratios:
            head += ["times ddp_world: wall", "CPU", "times the floor: wall", "CPU"]
        lines += [
            f"## {_SIZES.get(size, f'{size} ranks').capitalize()}\n",
            _row(head),
            _row(["---", *["---:"] * (len(head) - 1)]),
        ]
        for each in group:
            name = CATALOGUE[each.row].title
            if each.problem and not each.first:
                lines.append(_row([name, each.problem, *[""] * (len(head) - 2)]))
            else:
                until = f" (until it stopped: {each.problem})" if each.problem else ""
                lines.append(_row([name + until, *_cells(each, record)][: len(head)]))
        lines.append("")
    lines += ["Each row, for each test:\n"]
    lines += [
        f"- {row.title}: {row.what}"
        for row in CATALOGUE.values()
        if any(key == row.key for key, _ in record.measurements)
    ]
    lines += ["\n## Aims\n", _row(["what", "aim", "measured", ""]), _row(["---"] * 4)]
    lines += [_row([text, limit, value, verdict]) for text, limit, value, verdict in _aims(record)]
    return "\n".join(lines) + "\n" + _MEANING


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
