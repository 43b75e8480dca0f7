"""The rows of a table: what they find is told once, under the check line that compared it; and no row stops another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from ddpcheck.findings.evidence.script import OptimizerStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import make_finding
from ddpcheck.rules import others, registry
from ddpcheck.rules.registry import judge_all
from ddpcheck.rules.script_table import VIEWS
from ddpcheck.rules.verdict import Judged, Verdict, status_of
from ddpcheck.stream.entries import RankStarted
from ddpcheck.stream.rank_log import RankTrace
from ddpcheck.trace.optimizers import Optimizers
from ddpcheck.trace.script_facts import ScriptFacts
from ddpcheck.trace.view import NotRecorded, View
from ddpcheck.trace.wrappers import Copies
from tests.reports import codes


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
    compared = {"loop": ("passed", "3 steps"), "data": ("passed", "2 passes; 1 table"), "loss": None}
    assert lines(judge_all(FACTS, rows)) == compared  # the loss had no subject


def test_a_finding_stands_under_the_heading_of_the_row_that_made_it() -> None:
    cause, consequence = finding("DDP501", "module"), finding("DDP208", "a")
    judged = judge_all(FACTS, (row("loop", cause, held="3 steps"), row("data", consequence, held="2 passes")))
    assert codes(judged.findings) == ["DDP501"]
    both = ("failed", "DDP501"), ("failed", "DDP208, which comes with DDP501")
    assert lines(judged) == dict(zip(("loop", "data", "loss"), (*both, None), strict=True))
    assert lines(judged, kept=[])["loop"] == ("ignored", "ignored: DDP501")


def test_what_was_found_before_may_come_of_what_is_found_at_the_end() -> None:
    judged = judge_all(FACTS, (row("loop", finding("DDP507", "group 0 lr"), held="3 steps"),))
    judged = judged.with_findings("data", [finding("DDP405", "all_reduce")])
    assert [(one.code, one.tags) for one in judged.findings] == [("DDP405", ("DDP507",))]
    assert lines(judged)["loop"] == ("failed", "DDP507, which comes with DDP405")


def test_a_row_does_not_repeat_what_an_earlier_one_has_found() -> None:
    later = row("loss", finding("DDP305", "loss"), finding("DDP303", "loss"), name="Losses")
    for earlier, repeats in (("DDP305", True), ("DDP514", True), ("DDP507", False)):
        judged = judge_all(FACTS, (row("loop", finding(earlier, "targets")), later))
        assert codes(judged.findings) == [earlier, *["DDP305"][repeats:], "DDP303"]
    other = row("optimizers", finding("DDP503", "3.weight"), name="Optimizers")
    assert len(judge_all(FACTS, (row("loop", finding("DDP503", "2.weight")), other)).findings) == 2


def test_rules_name_rows_that_there_are() -> None:
    assert {name for rule in RULES.values() for name in rule.repeats} <= {view.__name__ for view in VIEWS}


def test_a_copy_is_left_out_if_the_cause_is_known() -> None:
    teacher = replace(finding("DDP214", "teacher"), tags=("of a copy",))
    for cause, is_alone in (("DDP301", True), ("DDP303", False)):
        judged = judge_all(FACTS, (row("loop", finding(cause, "a")), row("data", teacher, held="1 copy")))
        assert (codes(judged.findings) == [cause]) is is_alone


def test_a_judge_that_raises_leaves_the_others_be() -> None:
    raises: Any = type("Raises", (View,), {"checks": ("loss", "data"), "from_facts": fails})
    judged = judge_all(FACTS, (raises, row("loop", finding("DDP502", "no_sync"))))
    assert codes(judged.findings) == ["DDP502"]
    assert {name: str(error) for name, error in judged.errors.items()} == dict.fromkeys(raises.checks, "a bug")


def test_what_held_names_no_buffers_if_they_differ() -> None:
    buffers = finding("DDP214", "mean")
    held, detail = "modules, parameters, buffers and gradients match", "DDP214; modules, parameters and gradients match"
    assert status_of(Verdict(matching=held), [(buffers, buffers)], [buffers])[1] == detail
    assert status_of(Verdict(matching=held), [(buffers, buffers)], []) == ("ignored", f"ignored: {detail}")
    lacking = Verdict(matching=held, lacking="in part")
    assert status_of(lacking, [(buffers, buffers)], [])[1] == "modules, parameters and gradients match; in part"


WHY = "norms of gradients are not recorded by this torch"


@dataclass(frozen=True)
class Steps(View):
    checks: ClassVar[tuple[str, ...]] = ("loop", "optimizers")
    needs_all_ranks: ClassVar[bool] = False
    count: int = 2
    norms: Sequence[float] = ()

    @classmethod
    def from_facts(cls, _: ScriptFacts) -> Steps:
        return cls()

    @property
    def largest(self) -> float:
        if not self.norms:
            raise NotRecorded(WHY)
        return max(self.norms)

    def compared(self, check: str, findings: Sequence[Finding]) -> Iterator[str]:
        if check == "loop":
            yield f"{self.count} steps in order"
            if self.count > 2:
                raise NotRecorded("step 2 is not compared")


def judge_order(steps: Steps) -> list[Finding]:
    return [make_finding("DDP502", ("no_sync",), "No reduction.")] if steps.count < 2 else []


def judge_norms(steps: Steps) -> list[Finding]:
    return [make_finding("DDP504", ("optimizer",), "Stale.")] if steps.largest > 1 else []


@pytest.fixture(autouse=True)
def judges(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.import_rules()
    monkeypatch.setitem(registry._judges, Steps, [judge_norms, judge_order])


def test_a_judge_whose_fact_was_not_recorded_stops_no_other_judge() -> None:
    verdicts = registry.verdicts_of(Steps(1))
    assert codes(verdicts["loop"].findings) == ["DDP502"]
    assert verdicts["loop"].lacking == "" and verdicts["optimizers"] == Verdict([], "", WHY)
    judged = registry.judge_all(FACTS, [Steps])
    assert judged.status_of("loop", []) == ("passed", "2 steps in order")
    assert judged.status_of("optimizers", []) == ("skipped", WHY)


def test_a_comparison_names_what_matches_before_what_is_missing() -> None:
    verdicts = registry.verdicts_of(Steps(3, [2.0]))
    assert verdicts["loop"] == Verdict([], "3 steps in order", "step 2 is not compared")
    assert codes(verdicts["optimizers"].findings) == ["DDP504"]
    assert registry.verdicts_of(Steps(2, [0.5])) == {"loop": Verdict([], "2 steps in order"), "optimizers": Verdict([])}


def test_a_rule_of_others_has_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge_ddp504(steps: Steps) -> list[Finding]:
        return judge_norms(steps)

    monkeypatch.setattr(others, "judges_of_others", [(Steps, judge_ddp504)])
    judged = others.judge_third_party_rules(FACTS, finding("DDP504").severity)
    assert judged == ([], [f"DDP504 was not judged: {WHY}"])


def test_copies_of_parameters_that_differ_by_rounding_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [make_finding("DDP306", ("teacher",), "Diverged.")]
    monkeypatch.setattr("ddpcheck.rules.replicas.copies.judge_copied_states", lambda *_: faults)
    (verdict,) = registry.verdicts_of(Copies([], [])).values()
    assert [(finding.code, finding.tags) for finding in verdict.findings] == [("DDP306", ("of a copy",))]
    monkeypatch.setattr("ddpcheck.trace.wrappers.without_rounding", lambda replicas: [])
    rounded = type("Wrapper", (), {"compared": {0: ["a replica"]}})
    (verdict,) = registry.verdicts_of(Copies([], [], wrappers=[rounded()])).values()
    why = "copies not compared: the parameters that are copied differ between ranks by rounding"
    assert verdict == Verdict([], "", why)


def test_options_are_not_compared_if_an_optimizer_has_no_partner_on_another_rank() -> None:
    def lacking(*of_ranks: tuple[int, ...]) -> str:
        steps = [[OptimizerStep(n, 0, {}, Location("train.py", 9)) for n in optimizers] for optimizers in of_ranks]
        traces = [RankTrace(RankStarted(rank, 2, "gloo"), made, []) for rank, made in enumerate(steps)]
        return registry.verdicts_of(Optimizers(ScriptFacts(traces, ended=True)))["optimizers"].lacking

    assert lacking((0,), (0, 1)) == "options are not compared: 1 and 2 optimizers have stepped on the ranks"
    assert lacking((0,), (0,)) == ""
