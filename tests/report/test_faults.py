"""Every fault of the suite is found by code, subjects, ranks and cause, alone at its severity; every twin is clean.

Here on ranks: `make test` runs the fastest fault of every sixth code and the fastest twin of each family, and
`make test-all` more of both. `rules/test_judges_on_evidence.py` holds the judges to all of them on recorded evidence;
`make faults` runs all.
"""

import re

import pytest

from ddpcheck.findings.rules import RULES
from tests.faultsuite.cases import ROOT, Case, all_cases
from tests.faultsuite.rules_page import FOLDER, PAGE, rules_pages
from tests.faultsuite.runs import faults_in, faults_in_twin, report_on
from tests.faultsuite.selection import fastest_of_each_code, fastest_of_each_family
from tests.reports import shown
from tests.tiers import one_of, share

CASES = all_cases()
# the judges of the others run on recorded evidence in `make test`
ON_RANKS = fastest_of_each_code(CASES)[::3]
QUICK, QUICK_TWINS = ON_RANKS[::2], fastest_of_each_family(CASES)
FAULTS = [*ON_RANKS[1::2], *(case for case in one_of(20, CASES) if case not in ON_RANKS)]
TWINS = [case for case in one_of(20, CASES) if case not in QUICK_TWINS]
WITHOUT_FAULT = {
    "DDP207": "two types of device: gather/test_consistency.py",
    "DDP312": "no fault that is known is left unexplained: rules/test_parity.py",
    **dict.fromkeys(("DDP506", "DDP507", "DDP511", "DDP512", "DDP518", "DDP601", "DDP602"), "explained, never found"),
    **dict.fromkeys(
        ("DDP217", "DDP314", "DDP408", *(f"DDP52{number}" for number in range(4)), *(f"DDP80{n}" for n in range(1, 7))),
        "found by run alone, in examples/scripts",
    ),
    "DDP806": "found by run alone: run/test_run.py",
    "DDP603": "an error, not a finding: worlds/test_launchers.py",
}


@pytest.mark.parametrize("case", share([*QUICK, *FAULTS], QUICK), ids=str)
def test_the_fault_is_the_first_finding_and_alone_at_its_severity(case: Case) -> None:
    report = report_on(case, "broken")
    assert faults_in(case, report) == [], shown(report)


@pytest.mark.parametrize("case", share([*QUICK_TWINS, *TWINS], QUICK_TWINS), ids=str)
def test_the_twin_is_clean(case: Case) -> None:
    report = report_on(case, "fixed")
    assert faults_in_twin(report) == [], shown(report)


def test_each_code_and_each_family_has_a_fault() -> None:
    found = {case.expected.code for case in CASES}
    assert RULES.keys() - found == WITHOUT_FAULT.keys(), "a rule needs a fault in examples/faults, or a reason above"
    for code, (_, _, file) in ((code, reason.partition(": ")) for code, reason in WITHOUT_FAULT.items()):
        assert not file or code in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file} tests no {code}"
    assert {case.family for case in QUICK_TWINS} == {case.family for case in CASES}


def test_the_pages_of_rules_are_those_of_today() -> None:
    there = {path: path.read_text(encoding="utf-8") for path in (PAGE, *FOLDER.glob("*.md"))}
    assert there == rules_pages(CASES), "run python -m tests.faultsuite.rules_page"


def test_the_page_of_faults_has_a_row_for_each_case() -> None:
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[.*?\]\(\.\./examples/faults/(\S+)\.py\) .*\*\*(DDP\d{3})\*\*", text, re.MULTILINE)
    assert sorted(rows) == sorted((str(case), case.expected.code) for case in CASES), "run make faults"
