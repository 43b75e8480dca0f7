"""Every fault of the suite is found by code, subjects, ranks and cause, alone at its severity; every twin is clean."""

import pytest

from ddpcheck.check import check
from ddpcheck.findings import Report, Severity
from tests.faultsuite.cases import Case, all_cases
from tests.test_zoo import assert_healthy, shown

CASES = all_cases()


def report_on(case: Case, twin: str) -> Report:
    expected = case.expected
    return check(
        f"{case.path}:{twin}", world_size=expected.world_size, steps=expected.steps, timeout=expected.timeout or 20
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_fault_is_the_first_finding_and_alone_at_its_severity(case: Case) -> None:
    expected = case.expected
    report = report_on(case, "broken")
    assert report.findings, shown(report)
    first, *rest = report.findings
    assert (first.code, first.severity.value) == (expected.code, expected.severity), shown(report)
    assert sorted(first.subjects) == sorted(expected.subjects), shown(report)
    assert first.ranks == expected.ranks, shown(report)
    assert expected.cause in "\n".join([first.message, *first.evidence, str(first.location)]), shown(report)
    assert [f.code for f in rest if f.severity is first.severity] == [], shown(report)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_twin_is_clean(case: Case) -> None:
    assert_healthy(report_on(case, "fixed"))


def test_each_file_says_what_is_broken_in_a_line_that_fits_a_table() -> None:
    for case in CASES:
        assert 10 < len(case.title) <= 100, case
        assert not case.title.endswith("."), case
        assert Severity(case.expected.severity), case


def test_a_fault_is_named_once() -> None:
    titles = [case.title for case in CASES]
    assert len(set(titles)) == len(titles)
    assert {case.family for case in CASES} <= {"parameters", "ranks", "gradients", "running", "training"}
