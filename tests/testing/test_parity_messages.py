"""Acceptance of hand-made reports by a test, and messages on values that differ between ranks."""

from typing import Any

import pytest

from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import CheckResult, Finding, ParityEntry, Report, ReportError
from ddpcheck.findings.rules import Severity
from ddpcheck.testing.assertions.messages import (
    ComparedItem,
    CompareOptions,
    RankValues,
    differences,
    has_nothing_to_compare,
    mismatch_message,
    parity_failure_message,
    usage_error,
)

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


# --- What ranks hold -----------------------------------------------------------------------------------------------


def tensor(shape: tuple[int, ...] = (3, 4), fingerprint: int = 0, path: str = "") -> ComparedItem:
    return ComparedItem(
        path, "tensor", attributes=(("shape", str(shape)), ("dtype", "float32")), fingerprint=fingerprint
    )


def values_of(*entries: ComparedItem, **options: Any) -> RankValues:
    return RankValues(CompareOptions(**options), entries)


@pytest.mark.parametrize(
    ("odd", "common", "words"),
    [
        ([], [tensor()], "Not every rank holds it: a tensor of shape (3, 4) and dtype float32 on ranks 3 and 4;"),
        ([ComparedItem("", "mapping", 2)], [tensor()], "The ranks hold different things: a tensor of shape (3, 4)"),
        ([ComparedItem("", "number", 4)], [ComparedItem("", "number", 3)], "3 on ranks 3 and 4; 4 on rank 5."),
        ([tensor((2,))], [tensor()], "The values for attribute 'shape' do not match: (3, 4) on ranks 3 and 4; (2,) on"),
        (
            [tensor(path=f"[{number}]", fingerprint=1) for number in range(20)],
            [tensor(path=f"[{number}]") for number in range(20)],
            "19 more items are not the same on all ranks:\n  x[1]: values, on rank 5\n",
        ),
        ([tensor(path=".a"), tensor(path=".b")], [tensor((2,), path=".a")], "  x.b: only on rank 5"),
    ],
)
def test_the_message_names_the_items_and_the_ranks(odd: Any, common: Any, words: str) -> None:
    by_rank = {3: values_of(*common), 4: values_of(*common), 5: values_of(*odd)}
    assert words in mismatch_message(differences(by_rank), by_rank, "x")


def test_numbers_within_the_tolerance_are_no_difference() -> None:
    def by_rank(*numbers: float) -> dict[int, RankValues]:
        options = {"rtol": 0.0, "atol": 0.5, "equal_nan": True}
        return {rank: values_of(ComparedItem("", "number", number), **options) for rank, number in enumerate(numbers)}

    assert differences(by_rank(3.0, 3.5)) == differences(by_rank(float("nan"), float("nan"))) == []
    assert differences(by_rank(3.0, 4.0)) and differences(by_rank(3.0, float("inf"))) and differences(by_rank(1.0, 1))
    same = {rank: values_of(tensor(fingerprint=rank)) for rank in range(2)}
    (item,) = differences(same)
    assert mismatch_message([replace(item, distances={0: (0.0, ""), 1: (0.0, "")})], same) == ""


def test_the_numbers_of_a_few_groups_of_ranks_are_shown_and_the_rest_named() -> None:
    by_rank = {rank: values_of(tensor(fingerprint=rank)) for rank in range(8)}
    distances = {rank: (float(rank), f"up to {rank}" if rank else "") for rank in range(8)}
    message = mismatch_message([replace(item, distances=distances) for item in differences(by_rank)], by_rank)
    assert "Ranks 1 to 7 differ from rank 0." in message
    assert "up to 4 on rank 4" in message and "up to 3" not in message and "Less far apart: ranks 1 to 3" in message


def test_what_cannot_be_compared_comes_before_what_differs() -> None:
    values, refused = values_of(tensor()), RankValues(CompareOptions(), error="why")
    assert usage_error({3: values, 5: refused}) == "why (rank 5)"
    assert usage_error({3: values, 5: values}) == ""
    assert not has_nothing_to_compare(values) and has_nothing_to_compare(values_of(ComparedItem("", "value", "None")))
