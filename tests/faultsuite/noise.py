"""Writes the table of noise into docs/comparison.md: `python -m tests.faultsuite.noise`, without ranks.

Noise is findings beside the true one, as MPI-BugBench counts them. It is counted in the reports that records give, and
in docs/programs.md; no report of other held-out faults is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ddpcheck.findings.report import Report
from tests.faultsuite.cases import ROOT, all_cases
from tests.faultsuite.recorded import read_evidence, replay
from tests.faultsuite.recorded_scripts import report_on, runs
from tests.faultsuite.table import noise_row, put

PAGE = ROOT / "docs" / "comparison.md"
PROGRAMS = ROOT / "docs" / "programs.md"


def noise() -> str:
    """The table, as Markdown."""
    records = [(case, read_evidence(case)) for case in all_cases()]
    scripts = runs()
    return "\n".join(
        (
            "| | faults | found | noise | healthy, flagged |",
            "|---|---|---|---|---|",
            noise_row(
                "`report`, models of [the suite](faults.md)",
                _findings(replay(case, "broken", record) for case, record in records),
                _findings(replay(case, "fixed", record) for case, record in records),
            ),
            noise_row(
                "`run`, [scripts](scripts.md)",
                _findings(report_on(run) for run in scripts if run.has_fault),
                _findings(report_on(run) for run in scripts if not run.has_fault),
            ),
            noise_row("`run`, [public programs](programs.md)", programs(PROGRAMS.read_text(encoding="utf-8"))),
        )
    )


def _findings(reports: Iterable[Report]) -> list[int]:
    return [len(report.findings) for report in reports]


def programs(page: str) -> list[int]:
    """How many findings each fault in a public program has, from the page of these."""
    faults = [
        fault for row in re.findall(r"^\| .* \| (.*<br>.*) \|$", page, re.MULTILINE) for fault in row.split("<br>")
    ]
    return [len(re.findall(r"DDP\d{3} at ", fault)) for fault in faults]


if __name__ == "__main__":
    put(PAGE, "noise", noise())
