"""Record the answers of the ranks in the checks of the suite, for `tests/rules/test_judges_on_evidence.py`.

python -m tests.faultsuite.record                        all faults and their twins; five minutes
python -m tests.faultsuite.record gradients/batchnorm    the cases whose name begins like this
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.faultsuite.cases import Case
from tests.faultsuite.recorded import TWINS, evidence_text, forget_others, record, write_evidence
from tests.faultsuite.runs import chosen_cases, faults_in, faults_in_twin, for_each


def record_case(case: Case) -> list[str]:
    """Write the evidence of a case; returns where a report was not what is expected."""
    told = {twin: record(case, twin) for twin in TWINS}
    write_evidence(case, evidence_text(case, {twin: phases for twin, (_, phases) in told.items()}))
    faults = [f"broken: {fault}" for fault in faults_in(case, told["broken"][0])]
    return faults + [f"fixed: {fault}" for fault in faults_in_twin(told["fixed"][0])]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faultsuite.record", description=__doc__.partition("\n")[0])
    cases, chosen = chosen_cases(parser)
    begun, wrong = time.perf_counter(), 0
    for place, faults in for_each(cases, record_case):
        wrong += bool(faults)
        print(f"{place}: {'; '.join(faults) or 'recorded'}", file=sys.stderr, flush=True)
    if not chosen.names:
        forget_others(cases)
    print(f"{len(cases)} faults in {time.perf_counter() - begun:.0f} s, {wrong} not as expected", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
