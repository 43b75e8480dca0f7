"""A fact that was not recorded: its judge is not looked at, and the check line says why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest

from ddpcheck.findings.evidence.script import OptimizerStep
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import make_finding
from ddpcheck.rules import others, registry
from ddpcheck.rules.verdict import Verdict
from ddpcheck.stream.entries import RankStarted
from ddpcheck.stream.rank_log import RankTrace
from ddpcheck.trace.optimizers import Optimizers
from ddpcheck.trace.script_facts import ScriptFacts
from ddpcheck.trace.view import NotRecorded, View
from ddpcheck.trace.wrappers import Copies


@dataclass(frozen=True)
class Steps(View):
    checks: ClassVar[tuple[str, ...]] = ("loop", "optimizers")
    count: int = 3
    norms: Sequence[float] = ()

    @property
    def largest(self) -> float:
        if not self.norms:
            raise NotRecorded("norms of gradients are not recorded by this torch")
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


WHY = "norms of gradients are not recorded by this torch"


def test_a_judge_whose_fact_was_not_recorded_stops_no_other_judge() -> None:
    verdicts = registry.verdicts_of(Steps(1))
    assert [finding.code for finding in verdicts["loop"].findings] == ["DDP502"]
    assert verdicts["loop"].lacking == "" and verdicts["optimizers"] == Verdict([], "", WHY)


def test_a_comparison_names_what_matches_before_what_is_missing() -> None:
    verdicts = registry.verdicts_of(Steps(3, [2.0]))
    assert verdicts["loop"] == Verdict([], "3 steps in order", "step 2 is not compared")
    assert [finding.code for finding in verdicts["optimizers"].findings] == ["DDP504"]
    assert registry.verdicts_of(Steps(2, [0.5])) == {"loop": Verdict([], "2 steps in order"), "optimizers": Verdict([])}


def test_the_check_line_is_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Steps, "from_facts", classmethod(lambda cls, facts: cls(2)))
    judged = registry.judge_all(ScriptFacts([], ended=True), [Steps])
    assert judged.status_of("loop", []) == ("passed", "2 steps in order")
    assert judged.status_of("optimizers", []) == ("skipped", WHY)


def test_a_rule_of_others_has_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge_ddp504(steps: Steps) -> list[Finding]:
        return judge_norms(steps)

    monkeypatch.setattr(Steps, "from_facts", classmethod(lambda cls, facts: cls()))
    monkeypatch.setattr(Steps, "needs_all_ranks", False)
    monkeypatch.setattr(others, "judges_of_others", [(Steps, judge_ddp504)])
    findings, notes = others.judge_third_party_rules(
        ScriptFacts([], ended=True), make_finding("DDP504", (), "").severity
    )
    assert (findings, notes) == ([], [f"DDP504 was not judged: {WHY}"])


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
    def rank(number: int, *optimizers: int) -> RankTrace:
        steps = [OptimizerStep(optimizer, 0, {}, Location("train.py", 9)) for optimizer in optimizers]
        return RankTrace(RankStarted(number, 2, "gloo"), steps, [])

    uneven = Optimizers(ScriptFacts([rank(0, 0), rank(1, 0, 1)], ended=True))
    assert registry.verdicts_of(uneven)["optimizers"].lacking == (
        "options are not compared: 1 and 2 optimizers have stepped on the ranks"
    )
    even = Optimizers(ScriptFacts([rank(0, 0), rank(1, 0)], ended=True))
    assert registry.verdicts_of(even)["optimizers"].lacking == ""
