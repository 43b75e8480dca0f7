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
from importlib.metadata import version

from tests.faultsuite.cases import ROOT
from tests.faultsuite.recorded import forget_others, write_evidence
from tests.faultsuite.runs import chosen_cases, faults_in, faults_in_twin, for_each, run_case
from tests.faultsuite.table import comparison, endings, faults_page, put


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faultsuite", description=__doc__.partition("\n")[0])
    cases, chosen = chosen_cases(parser)
    rows, wrong = [], 0
    begun = time.perf_counter()
    for place, row in for_each(cases, run_case):
        rows.append(row)
        faults = [f"broken: {fault}" for fault in faults_in(row.case, row.report)]
        faults += [f"fixed: {fault}" for fault in faults_in_twin(row.twin)]
        wrong += bool(faults)
        said = "; ".join(faults) or f"{row.report.findings[0].code} as expected, twin clean"
        print(f"{place}: {row.tools['plain'].ending}; {said}", file=sys.stderr, flush=True)
    versions = f"torch {version('torch')}, gloo, {platform.system()}, mmengine {version('mmengine')}"
    page, table = faults_page(rows, versions), comparison(rows)
    if chosen.names:
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
