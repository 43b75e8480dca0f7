"""The rows of a table: what they find is told once, under the check line that compared it; and no row stops another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.findings.rules import RULES, rules_of_check
from ddpcheck.findings.wording import make_finding
from ddpcheck.rules import registry
from ddpcheck.rules.registry import judge_all
from ddpcheck.rules.script_table import HEADINGS, VIEWS
from ddpcheck.rules.verdict import Judged, Verdict, status_of
from ddpcheck.trace.script_facts import ScriptFacts
from ddpcheck.trace.view import View


def finding(code: str, *subjects: str) -> Finding:
    return make_finding(code, subjects, f"What {code} says.")


FACTS = ScriptFacts([], ended=True)


def row(heading: str, *found: Finding, held: str = "", name: str = "Row") -> Any:
    """A view with one judge, which finds `found`."""
    compared = [held] if held else []
    fields = {"checks": (heading,), "from_facts": lambda _: view(), "compared": lambda *_: compared}
    view: Any = type(name, (View,), fields)
    registry._judges[view] = [lambda _: found]
    return view


def fails(_: ScriptFacts) -> View:
    raise ZeroDivisionError("a bug")


def lines(judged: Judged, kept: Sequence[Finding] | None = None) -> dict[str, tuple[str, str] | None]:
    kept = judged.findings if kept is None else kept
    return {name: judged.status_of(name, kept) for name in ("loop", "data", "loss")}


def test_a_check_line_says_what_was_compared_under_its_heading() -> None:
    rows = (row("loop", held="3 steps"), row("data", held="2 passes"), row("data", held="1 table"), row("loss"))
    assert lines(judge_all(FACTS, rows)) == {
        "loop": ("passed", "3 steps"),
        "data": ("passed", "2 passes; 1 table"),
        "loss": None,  # it had no subject
    }


def test_what_yields_to_an_earlier_finding_is_crossed_under_its_own_heading_too() -> None:
    rows = (row("loop", finding("DDP301", "a")), row("data", finding("DDP301", "b"), held="2", name="Optimizers"))
    judged = judge_all(FACTS, rows)
    assert [one.subjects for one in judged.findings] == [("a",)]
    assert lines(judged)["data"] == ("failed", "DDP301")


def test_a_finding_stands_under_the_heading_of_the_row_that_made_it() -> None:
    cause, consequence = finding("DDP501", "module"), finding("DDP208", "a")
    judged = judge_all(FACTS, (row("loop", cause, held="3 steps"), row("data", consequence, held="2 passes")))
    assert [one.code for one in judged.findings] == ["DDP501"]
    assert lines(judged) == {
        "loop": ("failed", "DDP501"),
        "data": ("failed", "DDP208, which comes with DDP501"),
        "loss": None,
    }
    assert lines(judged, kept=[])["loop"] == ("ignored", "ignored: DDP501")


def test_what_was_found_before_may_come_of_what_is_found_at_the_end() -> None:
    judged = judge_all(FACTS, (row("loop", finding("DDP507", "group 0 lr"), held="3 steps"),))
    judged = judged.adding("data", [finding("DDP405", "all_reduce")])
    assert [(one.code, one.tags) for one in judged.findings] == [("DDP405", ("DDP507",))]
    assert lines(judged)["loop"] == ("failed", "DDP507, which comes with DDP405")


def test_a_row_does_not_repeat_what_an_earlier_one_has_found() -> None:
    later = row("loss", finding("DDP305", "loss"), finding("DDP303", "loss"), name="Losses")
    for earlier, codes in (("DDP305", ["DDP305", "DDP303"]), ("DDP514", ["DDP514", "DDP303"]), ("DDP507", None)):
        judged = judge_all(FACTS, (row("loop", finding(earlier, "targets")), later))
        assert [one.code for one in judged.findings] == (codes or ["DDP507", "DDP305", "DDP303"])
    other = row("optimizers", finding("DDP503", "3.weight"), name="Optimizers")
    assert len(judge_all(FACTS, (row("loop", finding("DDP503", "2.weight")), other)).findings) == 2


def test_rules_name_rows_that_there_are() -> None:
    assert {name for rule in RULES.values() for name in rule.repeats} <= {view.__name__ for view in VIEWS}


def test_a_copy_is_left_out_if_the_cause_is_known() -> None:
    teacher = replace(finding("DDP214", "teacher"), tags=("of a copy",))
    for cause, is_alone in (("DDP301", True), ("DDP303", False)):
        judged = judge_all(FACTS, (row("loop", finding(cause, "a")), row("data", teacher, held="1 copy")))
        assert ([one.code for one in judged.findings] == [cause]) is is_alone


def test_a_judge_that_raises_leaves_the_others_be() -> None:
    raises: Any = type("Raises", (View,), {"checks": ("loss", "data"), "from_facts": fails})
    judged = judge_all(FACTS, (raises, row("loop", finding("DDP502", "no_sync"))))
    assert [one.code for one in judged.findings] == ["DDP502"]
    assert {name: str(error) for name, error in judged.errors.items()} == {"loss": "a bug", "data": "a bug"}


@pytest.mark.parametrize("view", VIEWS)
def test_a_row_of_the_table_has_check_lines_with_rules(view: type[View]) -> None:
    assert set(view.checks) <= set(HEADINGS)
    assert all(rules_of_check("run", heading) for heading in view.checks)


def test_what_held_names_no_buffers_if_they_differ() -> None:
    buffers = finding("DDP214", "mean")
    held, codes = "modules, parameters, buffers and gradients match", "DDP214; modules, parameters and gradients match"
    assert status_of(Verdict(matching=held), [(buffers, buffers)], [buffers])[1] == codes
    assert status_of(Verdict(matching=held), [(buffers, buffers)], []) == ("ignored", f"ignored: {codes}")
    lacking = Verdict(matching=held, lacking="in part")
    assert status_of(lacking, [], [])[1] == f"{held}; in part"
    assert status_of(lacking, [(buffers, buffers)], [])[1] == "modules, parameters and gradients match; in part"
