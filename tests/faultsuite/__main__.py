"""Run the suite and write what was heard: `docs/faults.md`, the tables of tools in the README and in
`docs/comparison.md`, `tests/evidence`.

python -m tests.faultsuite                  all of it
python -m tests.faultsuite parameters/      the cases whose name begins like this; prints, writes nothing
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context

from tests.faultsuite.cases import ROOT, all_cases
from tests.faultsuite.recorded import forget_others, write_evidence
from tests.faultsuite.runs import faults_in, faults_in_twin, run_case
from tests.faultsuite.table import comparison, endings, faults_page, put

WORKERS = 2  # cases at a time; each has two ranks, which wait for each other most of the time


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faultsuite", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="beginnings of names of cases")
    chosen = parser.parse_args().names
    cases = [case for case in all_cases() if not chosen or str(case).startswith(tuple(chosen))]
    rows, wrong = [], 0
    begun = time.perf_counter()
    with ProcessPoolExecutor(min(WORKERS, len(cases)), mp_context=get_context("spawn")) as pool:
        for number, row in enumerate(pool.map(run_case, cases), 1):
            rows.append(row)
            faults = [f"broken: {fault}" for fault in faults_in(row.case, row.report)]
            faults += [f"fixed: {fault}" for fault in faults_in_twin(row.twin)]
            wrong += bool(faults)
            said = "; ".join(faults) or f"{row.report.findings[0].code} as expected, twin clean"
            print(
                f"[{number}/{len(cases)}] {row.case}: {row.tools['plain'].ending}; {said}", file=sys.stderr, flush=True
            )
    versions = f"torch {version('torch')}, gloo, {platform.system()}, mmengine {version('mmengine')}"
    page, table = faults_page(rows, versions), comparison(rows)
    if chosen:
        print(page, table, sep="\n")
    else:
        (ROOT / "docs").mkdir(exist_ok=True)
        (ROOT / "docs" / "faults.md").write_text(page, encoding="utf-8")
        for name in ("README.md", "docs/comparison.md"):
            put(ROOT / name, "comparison", table)
        put(ROOT / "docs" / "comparison.md", "endings", endings(page))
        for row in rows:
            write_evidence(row.case, row.evidence)
        forget_others(cases)
    print(f"{len(rows)} faults in {time.perf_counter() - begun:.0f} s, {wrong} not as expected", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
