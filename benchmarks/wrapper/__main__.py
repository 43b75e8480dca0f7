"""What a healthy step of `CheckedDistributedDataParallel` costs beside plain DDP, and what others cost, in one run.

Every alternative makes its steps in turns in the same processes, two ranks under gloo on CPU, and is compared turn by
turn. docs/benchmarks-wrapper.md says what is measured, and what it means.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from benchmarks.harnesses.record import surroundings
from benchmarks.wrapper.cases import CASES, Case
from benchmarks.wrapper.figures import Measured, Record
from benchmarks.wrapper.ranks import MMENGINE, SECOND, UNUSED, measure
from benchmarks.wrapper.table import PAGE, for_page, for_terminal
from ddpcheck import World
from ddpcheck.findings.errors import DDPCheckError

_RANKS = 2
_SPARE = 2  # times what models and gradients need
_DEADLINE = 3000.0


def main() -> int:
    """Measure, show, write; exit code 1 where a case failed."""
    keys = "\n".join(f"  {case.key:14}{case.title}" for case in CASES.values())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wrapper",
        description=__doc__,
        epilog=f"cases:\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one model, briefly: no figures to quote")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help="these cases")
    parser.add_argument("--seconds", type=float, metavar="S", help="for each part of a case (default 60)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all clocks to FILE")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source", help="show what --json wrote")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(PAGE.parents[1])}")
    options = parser.parse_args()
    if options.write and (options.quick or options.only) and not options.source:
        parser.error("--write is for a whole run: without --quick and --only")
    if options.source:
        record = Record.load(options.source)
    else:
        cases = [CASES[key] for key in options.only or CASES]
        if options.quick and not options.only:
            cases = [case for case in cases if case.quick]
        seconds = (1.0 if options.quick else 60.0) if options.seconds is None else options.seconds
        record = Record(surroundings(), [_measured(case, seconds) for case in cases])
    if options.json:
        record.save(options.json)
    print(for_terminal(record), end="")
    if options.write:
        PAGE.write_text(for_page(record), encoding="utf-8")
        print(f"written: {PAGE.relative_to(PAGE.parents[1])}", file=sys.stderr)
    return 1 if any(one.failed for one in record.measurements) else 0


def _measured(case: Case, seconds: float) -> Measured:
    names = [UNUSED, SECOND, *([MMENGINE] if importlib.util.find_spec("mmengine") else [])]
    free = _free_memory()
    for dropped in (SECOND, UNUSED):  # each is a copy of the model
        copies = 1 + (UNUSED in names) + (SECOND in names)
        if _RANKS * copies * case.memory * _SPARE > free:
            names.remove(dropped)
    if _RANKS * case.memory * _SPARE > free:
        return Measured(case.key, problem="not enough memory here")
    print(f"{case.title}: plain, checked, {', '.join(names)} ...", file=sys.stderr, flush=True)
    try:
        with World(_RANKS) as world:
            return Measured(case.key, world.run(measure, case, names, seconds, 6, timeout=_DEADLINE))
    except DDPCheckError as error:
        print(error, file=sys.stderr)
        return Measured(case.key, problem=type(error).__name__, failed=True)


def _free_memory() -> float:
    """Bytes that new processes can have."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return float(line.split()[1]) * 1024
    return 0.0


if __name__ == "__main__":
    sys.exit(main())
