"""What a distributed test costs: ddpcheck beside the harnesses that people use, on one machine in one run.

Every row does the same work: W processes, a gloo group, one all_reduce that is checked, an orderly end. Ratios are
what to compare. docs/benchmarks.md says what is measured, and what it means.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from benchmarks.harnesses.catalogue import CATALOGUE, SIZES
from benchmarks.harnesses.record import Record
from benchmarks.harnesses.running import measure, say_to_stderr
from benchmarks.harnesses.table import PAGE, for_page, for_terminal


def main() -> int:
    """Measure, show, write; exit code 1 where a harness failed."""
    rows = "\n".join(f"  {row.key:14}{row.what.replace('`', '')}" for row in CATALOGUE.values())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.harnesses",
        description=__doc__,
        epilog=f"rows:\n{rows}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one repetition of shorter sessions: no figures to quote")
    parser.add_argument("--repetitions", type=int, metavar="N", help="how often each session is timed (default 3)")
    parser.add_argument("--ranks", type=int, nargs="+", choices=SIZES, default=SIZES, help="world sizes (default: 2 4)")
    parser.add_argument("--only", nargs="+", choices=CATALOGUE, metavar="ROW", help="these rows")
    parser.add_argument(
        "--deadline", type=float, default=900.0, metavar="SECONDS", help="for each session (default 900)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all sessions and figures to FILE")
    parser.add_argument(
        "--from", type=Path, metavar="FILE", dest="source", help="show what --json wrote; measure nothing"
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(PAGE.parents[1])}")
    options = parser.parse_args()
    repetitions = (1 if options.quick else 3) if options.repetitions is None else options.repetitions
    if repetitions < 1:
        parser.error("--repetitions must be at least 1")
    if options.write and (options.quick or options.only) and not options.source:
        parser.error("--write is for a whole run: without --quick and --only")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the session under way, as Ctrl-C does
    if options.source:
        record = Record.load(options.source)
    else:
        rows = [row for row in CATALOGUE.values() if not options.only or row.key in options.only]
        record = measure(
            rows,
            options.ranks,
            quick=options.quick,
            repetitions=repetitions,
            deadline=options.deadline,
            say=say_to_stderr,
        )
    if options.json:
        record.save(options.json)
    print(for_terminal(record), end="")
    if not record.complete:
        say_to_stderr("interrupted: these are the figures until then")
        return 130
    if options.write:
        PAGE.write_text(for_page(record), encoding="utf-8")
        say_to_stderr(f"written: {PAGE.relative_to(PAGE.parents[1])}")
    return 1 if any(each.failed for each in record.measurements.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
