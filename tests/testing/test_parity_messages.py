"""What a test accepts, from hand-made reports and from what ranks say of their parameters."""

from typing import Any

import pytest

from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import CheckResult, Finding, ParityEntry, Report, ReportError
from ddpcheck.findings.rules import Severity
from ddpcheck.testing.assertions.messages import parity_failure_message

torch = pytest.importorskip("torch")


def entry(reference: str, **more: Any) -> ParityEntry:
    return replace(ParityEntry(0, "weight", reference, 1e-7, 1e-6, 1e-7, 1.0, 4), **more)


BOTH = (entry("local"), entry("single-process"))
CHECKS = (CheckResult("reducer", "passed"), CheckResult("parity", "passed"))


def report(*findings: Finding, parity: tuple[ParityEntry, ...] = BOTH, **more: Any) -> Report:
    return Report("x.py", world={"world_size": 2, "steps": 1}, checks=CHECKS, findings=findings, parity=parity, **more)


def finding(code: str, severity: Severity = Severity.ERROR, **more: Any) -> Finding:
    return Finding(code, ("weight",), f"This is {code}.", severity, **more)


@pytest.mark.parametrize(("code", "severity"), [("DDP301", Severity.ERROR), ("DDP304", Severity.NOTE)])
def test_findings_on_gradients_are_not_accepted_whatever_their_severity(code: str, severity: Severity) -> None:
    differs = report(finding(code, severity, evidence=("a fact",)))
    message = parity_failure_message(differs)
    assert message.startswith("Gradients are not close!") and f"{code} weight: This is {code}." in message
    assert "  a fact" in message and "  fix: " in message
    assert parity_failure_message(differs, ignore=[code]) == ""
    assert parity_failure_message(differs, select=["DDP302"]) == ""


def test_other_errors_and_causes_of_other_gradients_are_not_accepted_and_other_warnings_are() -> None:
    assert "DDP501" in parity_failure_message(report(finding("DDP501")))
    evidence = ("with it comes DDP304: Samples are coupled.",)
    cause = finding("DDP214", Severity.WARNING, evidence=evidence, tags=("DDP304",))
    assert "DDP214" in parity_failure_message(report(cause))
    for accepted in ([], [finding("DDP215", Severity.WARNING, tags=("DDP506",))], [finding("DDP109", Severity.NOTE)]):
        assert parity_failure_message(report(*accepted)) == ""


@pytest.mark.parametrize("code", ["DDP307", "DDP308"])
def test_where_nothing_could_be_compared_ignoring_it_does_not_help(code: str) -> None:
    for options in ({}, {"ignore": [code]}, {"select": ["DDP301"]}):
        message = parity_failure_message(report(finding(code, Severity.WARNING)), **options)
        assert message.startswith("Gradients could not be compared!") and code in message


@pytest.mark.parametrize(
    ("missing", "name", "words", "select"),
    [
        ("local", "reducer", "average of the ranks", ["DDP303", "DDP304"]),
        ("single-process", "parity", "single process", ["DDP301"]),
    ],
)
def test_a_comparison_that_was_not_made_is_not_accepted(missing: str, name: str, words: str, select: list[str]) -> None:
    skipped = tuple(CheckResult(c.name, "skipped", detail="why") if c.name == name else c for c in CHECKS)
    lacking = replace(report(parity=tuple(item for item in BOTH if item.reference != missing)), checks=skipped)
    message = parity_failure_message(lacking)
    assert message.startswith("Gradients could not be compared!") and words in message and message.endswith(": why")
    assert parity_failure_message(lacking, select=select) == "", "it was not asked for"
    assert parity_failure_message(lacking, ignore=["DDP304"]) != ""
    partial_report = replace(report(), checks=skipped)
    assert parity_failure_message(partial_report).endswith(": why"), "some steps are not all"
    assert parity_failure_message(partial_report, select=select) == ""


def test_a_check_that_was_not_finished_is_not_accepted() -> None:
    unfinished = report(error=ReportError("rank 1 raised ValueError", 3))
    message = parity_failure_message(unfinished)
    assert message.startswith("Gradients could not be compared!") and "rank 1 raised ValueError" in message
    assert parity_failure_message(unfinished, ignore=["DDP"]) != ""


def test_a_difference_of_which_nothing_is_said_is_not_accepted() -> None:
    far = (entry("local"), entry("single-process", relative_error=0.5))
    message = parity_failure_message(report(parity=far))
    assert "1 of 2 comparisons" in message and "relative error 0.5, allowed 1e-06" in message
    assert parity_failure_message(report(finding("DDP304", Severity.WARNING), parity=far), ignore=["DDP304"]) == ""


def test_a_tolerance_takes_the_place_of_the_measured_one() -> None:
    far = (entry("local"), entry("single-process", relative_error=0.5, absolute_error=0.5))
    coupled = report(finding("DDP304", Severity.WARNING), parity=far)
    for tolerance in ((0.5, 0.0), (0.0, 0.25)):
        assert parity_failure_message(coupled, tolerance=tolerance) == ""
    message = parity_failure_message(coupled, tolerance=(0.4, 0.02))
    assert "DDP304" in message and "norm of the difference 0.5, allowed 0.44 (0.02 * sqrt(4) + 0.4 * 1)" in message
    assert parity_failure_message(report(), tolerance=(1e-6, 0.0)) == ""
    for tolerance in ((1e-8, 0.0), (0.0, 0.0)):
        assert parity_failure_message(report(), tolerance=tolerance) != "", "also where it is the stricter one"
    for code in ("DDP301", "DDP306"):  # ranks are bit-identical
        assert code in parity_failure_message(report(finding(code)), tolerance=(1.0, 1.0))
