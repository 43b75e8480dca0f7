"""The same recipe gives the same findings, 20 times in a row, in worlds of 2, 3 and 4 ranks, on a busy machine.

python -m tests.faultsuite.steady [NAME ...]    beginnings of names of cases; all of them when absent
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tests.faultsuite.cases import Case
from tests.faultsuite.runs import chosen_cases, report_on
from tests.reports import comparable

TIMES = 20
WORLD_SIZES = (2, 3, 4)


@contextlib.contextmanager
def busy_machine() -> Iterator[None]:
    """Keep every core busy with processes that do nothing else."""
    spinning = [sys.executable, "-S", "-c", f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(10000))"]
    processes = [subprocess.Popen(spinning) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def verdicts(case: Case, twin: str, world_size: int, times: int, *, at_once: int = 1) -> list[str]:
    """What `times` checks find, one after the other, or several at once, so that each is in the way of the others."""

    def verdict(_number: int) -> str:
        return json.dumps(comparable(report_on(case, twin, world_size=world_size))["findings"])

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(verdict, range(times)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faultsuite.steady", description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=TIMES)
    cases, chosen = chosen_cases(parser)
    unsteady = 0
    with busy_machine():
        for number, case in enumerate(cases, 1):
            for world_size in WORLD_SIZES:
                for twin in ("broken", "fixed"):
                    heard = sorted(set(verdicts(case, twin, world_size, chosen.times)))
                    if len(heard) > 1:
                        unsteady += 1
                        print(f"{case}:{twin} at world size {world_size}: {len(heard)} verdicts", *heard, sep="\n  ")
            print(f"[{number}/{len(cases)}] {case}", file=sys.stderr, flush=True)
    print(f"{len(cases)} faults and twins, {chosen.times} times at {WORLD_SIZES}: {unsteady} unsteady")
    return 1 if unsteady else 0


if __name__ == "__main__":
    sys.exit(main())
