"""The rows of a table: what they find is told once, under the check line that compared it; and no row stops another."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ddpcheck.findings.report import Finding
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import make_finding
from ddpcheck.rules.script_table import HEADINGS, ROWS
from ddpcheck.rules.verdict import Judged, Row, Verdict, Verdicts, judge_all, status_of


def finding(code: str, *subjects: str) -> Finding:
    return make_finding(code, subjects, f"What {code} says.")


def row(
    heading: str, *found: Finding, held: str = "", yields: tuple[str, ...] = (), unless: tuple[str, ...] = ()
) -> Row[None]:
    codes = tuple(one.code for one in found)
    return Row(lambda _: {heading: Verdict(found, held)}, (heading,), codes, yields, unless)


def fails(_: None) -> Verdicts:
    raise ZeroDivisionError("a bug")


def lines(judged: Judged, kept: Sequence[Finding] | None = None) -> dict[str, tuple[str, str] | None]:
    kept = judged.findings if kept is None else kept
    return {name: judged.status_of(name, kept) for name in ("loop", "data", "loss")}


def test_a_check_line_says_what_was_compared_under_its_heading() -> None:
    rows = (row("loop", held="3 steps"), row("data", held="2 passes"), row("data", held="1 table"), row("loss"))
    assert lines(judge_all(None, rows)) == {
        "loop": ("passed", "3 steps"),
        "data": ("passed", "2 passes; 1 table"),
        "loss": None,  # it had no subject
    }


def test_what_yields_to_an_earlier_finding_is_crossed_under_its_own_heading_too() -> None:
    rows = (row("loop", finding("DDP301", "a")), row("data", finding("DDP301", "b"), held="2", yields=("DDP301",)))
    judged = judge_all(None, rows)
    assert [one.subjects for one in judged.findings] == [("a",)]
    assert lines(judged)["data"] == ("failed", "DDP301")


def test_a_finding_stands_under_the_heading_of_the_row_that_made_it() -> None:
    cause, consequence = finding("DDP501", "module"), finding("DDP208", "a")
    judged = judge_all(None, (row("loop", cause, held="3 steps"), row("data", consequence, held="2 passes")))
    assert [one.code for one in judged.findings] == ["DDP501"]
    assert lines(judged) == {
        "loop": ("failed", "DDP501"),
        "data": ("failed", "DDP208, which comes with DDP501"),
        "loss": None,
    }
    assert lines(judged, kept=[])["loop"] == ("ignored", "ignored: DDP501")


def test_what_was_found_before_may_come_of_what_is_found_at_the_end() -> None:
    judged = judge_all(None, (row("loop", finding("DDP507", "group 0 lr"), held="3 steps"),))
    judged = judged.adding("data", [finding("DDP405", "all_reduce")])
    assert [(one.code, one.tags) for one in judged.findings] == [("DDP405", ("DDP507",))]
    assert lines(judged)["loop"] == ("failed", "DDP507, which comes with DDP405")


def test_what_an_earlier_row_says_better_is_left_out() -> None:
    weights, sums = finding("DDP305", "targets"), finding("DDP305", "loss")
    yields = row("loss", sums, finding("DDP303", "loss"), yields=("DDP305", "DDP514"))
    assert [one.code for one in judge_all(None, (row("loop", weights), yields)).findings] == ["DDP305", "DDP303"]
    assert judge_all(None, (row("loop", finding("DDP514", "loss")), yields)).findings[1].code == "DDP303"
    assert [one.code for one in judge_all(None, (row("loop"), yields)).findings] == ["DDP305", "DDP303"]


def test_a_row_is_not_asked_where_its_cause_is_known() -> None:
    copies = row("data", finding("DDP214", "teacher"), held="1 copy", unless=("DDP301",))
    judged = judge_all(None, (row("loop", finding("DDP301", "a")), copies))
    assert [one.code for one in judged.findings] == ["DDP301"] and lines(judged)["data"] is None
    assert len(judge_all(None, (row("loop", finding("DDP303", "a")), copies)).findings) == 2


def test_a_judge_that_raises_leaves_the_others_be() -> None:
    judged = judge_all(None, (Row(fails, ("loss", "data"), ()), row("loop", finding("DDP502", "no_sync"))))
    assert [one.code for one in judged.findings] == ["DDP502"]
    assert {name: str(error) for name, error in judged.errors.items()} == {"loss": "a bug", "data": "a bug"}


@pytest.mark.parametrize("one", ROWS, ids=lambda one: "-".join(one.headings))
def test_a_row_of_the_table_names_rules_and_check_lines_that_there_are(one: Row[object]) -> None:
    assert set(one.headings) <= set(HEADINGS)
    assert {*one.codes, *one.yields, *one.unless} <= RULES.keys()
    assert set(one.yields) <= set(one.codes) and len(set(one.codes)) == len(one.codes)


def test_what_held_names_no_buffers_if_they_differ() -> None:
    buffers = finding("DDP214", "mean")
    held, codes = "modules, parameters, buffers and gradients match", "DDP214; modules, parameters and gradients match"
    assert status_of(Verdict(held=held), [(buffers, buffers)], [buffers])[1] == codes
    assert status_of(Verdict(held=held), [(buffers, buffers)], []) == ("ignored", f"ignored: {codes}")
    lacking = Verdict(held=held, lacking="in part")
    assert status_of(lacking, [], [])[1] == f"{held}; in part"
    assert status_of(lacking, [(buffers, buffers)], [])[1] == "modules, parameters and gradients match; in part"
