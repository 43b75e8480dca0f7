"""Record what ranks leave under `ddpcheck run`, for `tests/rules/test_scripts_on_records.py`.

python -m tests.faultsuite.record_scripts                  all scripts, twins and healthy loops; half an hour
python -m tests.faultsuite.record_scripts masked_mean      the runs whose name begins like this
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ddpcheck.run.script_report as door
from ddpcheck.cli import main as ddpcheck
from tests.faultsuite.cases import ROOT
from tests.faultsuite.evidence import EvidenceError
from tests.faultsuite.recorded_scripts import FOLDER, Run, assert_as_expected, read, report_on, runs, written

_PATIENCE = 300.0  # seconds
_WORKERS = 2  # scripts at a time
_ATTEMPTS = 2  # gloo now and then aborts a healthy process at its exit, under plain torchrun too


def record(run: Run) -> str:
    """Run a script, and keep what its ranks leave; what is not as expected, empty where all is."""
    launched = [sys.executable, "-m", __spec__.name, "--of", str(run)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    said = ""
    for _ in range(_ATTEMPTS):
        subprocess.run(launched, env=env, cwd=ROOT, capture_output=True, timeout=_PATIENCE, check=False)
        read.cache_clear()
        try:
            assert_as_expected(run, report_on(run))
        except (AssertionError, EvidenceError) as error:
            said = f"{error}".partition("\n")[0]
        else:
            return ""
    return said


def _record_here(run: Run) -> int:
    def reported(script: str, ending: Any, ranks: Any, *settings: Any, singles: Any = (), **options: Any) -> Any:
        FOLDER.mkdir(exist_ok=True)
        run.path.write_text(written(run, ending, ranks, singles), encoding="utf-8")
        return report(script, ending, ranks, *settings, singles=singles, **options)

    report, door.report_on_script = door.report_on_script, reported
    options = ("--check-timeout", "5", "--check-format", "text", *run.options)
    return ddpcheck(["run", "--standalone", "--nproc-per-node", "2", *options, run.script, *run.arguments])


def main() -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="beginnings of names of runs")
    parser.add_argument("--of", help=argparse.SUPPRESS)
    given = parser.parse_args()
    by_name = {str(run): run for run in runs()}
    if given.of is not None:
        return _record_here(by_name[given.of])
    chosen = [run for name, run in by_name.items() if not given.names or name.startswith(tuple(given.names))]
    begun, wrong = time.perf_counter(), 0
    with ThreadPoolExecutor(_WORKERS) as pool:
        for number, (run, said) in enumerate(zip(chosen, pool.map(record, chosen), strict=True), 1):
            wrong += bool(said)
            print(f"[{number}/{len(chosen)}] {run}: {said or 'recorded'}", file=sys.stderr, flush=True)
    if not given.names:
        for path in set(FOLDER.glob("*.json")) - {run.path for run in by_name.values()}:
            Path(path).unlink()
    print(f"{len(chosen)} runs in {time.perf_counter() - begun:.0f} s, {wrong} not as expected", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
