"""The formats that other programs read: SARIF, JUnit XML, GitHub's workflow commands, Markdown."""

from __future__ import annotations

import functools
import html
import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft4Validator

from ddpcheck.cli import main
from ddpcheck.findings.figures import ParameterPath, PathStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location, RelatedLocation, Report, ReportError
from ddpcheck.findings.rules import RULES, Severity, sections_of
from ddpcheck.findings.wording import make_finding
from ddpcheck.monitor.reporting import format_finding
from ddpcheck.render import FORMATS, Medium, renderer_for
from ddpcheck.render.github import MOST_OF_A_KIND
from ddpcheck.render.parts import Fact, facts_of
from ddpcheck.render.sarif import MOST_RESULTS
from tests.faultsuite.cases import ROOT
from tests.render.test_render import COUPLED, REPORT, UNUSED

HANG = Finding(
    "DDP403",
    ("barrier",),
    "Collective number 3 differs between the ranks.",
    Severity.ERROR,
    location=Location("/home/me/my script.py", 9),
    evidence=("rank 0, collective number 3: barrier() at train.py:9", "rank 1, collective number 3: none"),
)
ODD = "<script>`x`[red]|::error::%\x1b[31m\n\x00"
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
findings = st.builds(
    Finding,
    st.sampled_from(["DDP101", "DDP403", "DDP999"]),
    st.lists(text, max_size=3).map(tuple),
    text,
    st.sampled_from(Severity),
    location=st.none() | st.builds(Location, text.filter(bool), st.integers(0, 99)),
    evidence=st.lists(text, max_size=3).map(tuple),
)


def rendered(name: str, report: Report, **medium: Any) -> str:
    return renderer_for(name, medium=Medium(**medium)).render(report)


SARIF_SCHEMA = Path(__file__).parents[1] / "data" / "sarif-schema-2.1.0.json"  # of OASIS, as it is published


@functools.cache
def sarif_validator() -> Draft4Validator:
    return Draft4Validator(json.loads(SARIF_SCHEMA.read_text(encoding="utf-8")))


def sarif(report: Report) -> dict[str, Any]:
    """The run of a report as SARIF, which is valid."""
    log = json.loads(rendered("sarif", report))
    sarif_validator().validate(log)
    (run,) = log["runs"]
    return dict(run)


COUNTS = {"tests", "failures", "errors", "skipped"}
JUNIT: dict[str, tuple[set[str], set[str], set[str]]] = {
    "testsuites": (set(), set(), {"testsuite"}),
    "testsuite": ({"name", *COUNTS, "time"}, set(), {"testcase"}),
    "testcase": ({"name", "classname", "time"}, set(), {"skipped", "error", "failure", "system-out"}),
    "failure": ({"type"}, {"message"}, set()),
    "error": (set(), {"message", "type"}, set()),
    "skipped": (set(), {"message"}, set()),
    "system-out": (set(), set(), set()),
}
"""By element: required attributes, others, and children; Jenkins's xunit plugin refuses a file that has more."""


def junit(report: Report) -> ElementTree.Element:
    """The suite of a report as JUnit XML, which is valid."""
    document = ElementTree.fromstring(rendered("junit", report))
    for element in document.iter():
        required, others, children = JUNIT[element.tag]
        assert required <= {*element.keys()} <= required | others, element.tag
        assert {child.tag for child in element} <= children, element.tag
        assert re.fullmatch(r"\d+\.\d{3}", element.get("time", "0.000"))
        assert all(element.get(key, "0").isdecimal() for key in COUNTS)
    (suite,) = document
    for kind, count in (("testcase", "tests"), ("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        assert suite.get(count) == str(sum(1 for _ in suite.iter(kind)))
    return suite


def test_sarif_has_the_rules_and_a_result_for_each_finding_worst_first() -> None:
    run = sarif(REPORT)
    assert run["tool"]["driver"]["version"] == "0.1.0"
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    results = [(rules[result["ruleIndex"]], result["ruleId"], result["level"]) for result in run["results"]]
    assert results == [("DDP101", "DDP101", "error"), ("DDP304", "DDP304", "warning")]
    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": "model.py"}, "region": {"startLine": 25}}
    lost = run["results"][1]["locations"][0]["physicalLocation"]  # GitHub shows no result without a place
    assert lost["artifactLocation"]["uri"] == "examples/net.py"
    assert run["invocations"][0]["executionSuccessful"]


def test_sarif_shows_the_threads_of_ranks_and_of_the_path_of_a_parameter() -> None:
    (result,) = sarif(replace(REPORT, findings=(HANG,)))["results"]
    (thread,) = result["codeFlows"][0]["threadFlows"]
    assert thread["id"] == "rank 0"
    assert thread["locations"][0]["location"]["physicalLocation"]["region"] == {"startLine": 9}
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "file:///home/me/my%20script.py"
    steps = (PathStep("linear()", "head", Location("model.py", 31)), PathStep("view()"))
    path = ParameterPath("head.weight", "cut", steps, reason="torch.no_grad()", begins_at=Location("train.py", 7))
    (result,) = sarif(replace(REPORT, findings=(replace(UNUSED, path=path),)))["results"]
    (thread,) = result["codeFlows"][0]["threadFlows"]
    lines = [step["location"]["physicalLocation"]["region"]["startLine"] for step in thread["locations"]]
    assert thread["id"].startswith("from head.weight") and lines == [25, 31, 7]


def test_each_format_shows_where_a_finding_was_noticed_beside_the_line_to_edit() -> None:
    made, edit = Location("model.py", 25), Location("model.py", 31)
    moved = UNUSED.relocated(edit, "parameter made")
    assert moved.location == edit and moved.related == (RelatedLocation("parameter made", made),)
    assert moved.relocated(made).relocated(edit, "parameter made") == moved and UNUSED.relocated(None) is UNUSED
    assert make_finding("DDP101", (), "", location=edit, related={"noticed": edit, "made": None}).related == ()
    report = replace(REPORT, findings=(moved,))
    for name in FORMATS:
        assert "parameter made" in rendered(name, report), name
    (result,) = sarif(report)["results"]
    lines = [related["physicalLocation"]["region"]["startLine"] for related in result["relatedLocations"]]
    assert (lines, result["relatedLocations"][0]["message"]) == ([25], {"text": "parameter made"})
    assert Report.from_json(report.to_json()).findings == report.findings
    assert "parameter made at model.py:25" in format_finding(moved)


def test_sarif_leaves_off_the_least_severe_and_knows_a_finding_again() -> None:
    many = tuple(replace(COUPLED, subjects=(f"bn{number}",)) for number in range(MOST_RESULTS))
    run = sarif(replace(REPORT, findings=(*many, UNUSED), checks=()))
    assert len(run["results"]) == MOST_RESULTS and run["results"][0]["ruleId"] == "DDP101"
    (note,) = run["invocations"][0]["toolExecutionNotifications"]
    assert note["message"]["text"].startswith("1 finding ")
    moved = replace(UNUSED, location=Location("model.py", 99), message="3 parameters", evidence=())
    results = sarif(replace(REPORT, findings=(UNUSED, moved, replace(UNUSED, subjects=("tail.weight",)))))["results"]
    prints = [result["partialFingerprints"] for result in results]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("code", RULES)
def test_the_page_of_a_rule_explain_sarif_and_html_say_the_same(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = replace(REPORT, findings=(Finding(code, ("x",), "It is.", Severity.ERROR, fix="Another fix."),))
    (rule,) = sarif(report)["tool"]["driver"]["rules"]
    assert main(["explain", code]) == 0
    page = (ROOT / "docs" / "rules" / f"{code}.md").read_text(encoding="utf-8")
    written = {
        "explain": capsys.readouterr().out,
        "page": re.sub(r"\\(?=\W|_)", "", page),
        "text": rule["help"]["text"],
        "markdown": re.sub(r"\\(?=\W|_)", "", rule["help"]["markdown"]),
        "html": html.unescape(re.sub("<[^>]*>", "", rendered("html", report))),
    }
    for heading, text in sections_of(RULES[code]):
        for name, shown in written.items():
            said = " ".join(shown.split())
            assert heading in said and " ".join(text.split()) in said, (name, heading)


def test_junit_and_a_check_that_stopped() -> None:
    suite = junit(REPORT)
    assert [suite.get(key) for key in ("tests", "failures", "errors", "skipped")] == ["5", "1", "0", "1"]
    (failure,) = suite.iter("failure")
    assert failure.get("type") == "DDP101" and "at model.py:25, on rank 1, in steps 0 and 2" in (failure.text or "")
    stopped = Report("net.py", error=ReportError("The model raised.", 3, "Traceback ..."))
    assert not sarif(stopped)["invocations"][0]["executionSuccessful"] and junit(stopped).get("errors") == "1"
    assert rendered("github", stopped).startswith("::error title=ddpcheck::The model raised.\n")
    assert "**Stopped:** The model raised." in rendered("markdown", stopped)


def test_annotations_are_short_and_ten_of_a_kind_and_the_rest_is_counted() -> None:
    long = replace(UNUSED, evidence=tuple(f"fact {number} " * 9 for number in range(9)))
    (line,) = [line for line in rendered("github", replace(REPORT, findings=(long,))).splitlines() if "DDP101" in line]
    assert "characters left out" in line and len(line) < 500
    many = tuple(replace(UNUSED, subjects=(f"a{number}",)) for number in range(MOST_OF_A_KIND + 2))
    lines = rendered("github", replace(REPORT, findings=(*many, COUPLED))).splitlines()
    assert sum(line.startswith("::error file=model.py,line=25,title=DDP101") for line in lines) == MOST_OF_A_KIND
    assert sum(line.startswith("::warning title=DDP304") for line in lines) == 1
    assert lines[-1].endswith("2 more errors not annotated")


@settings(max_examples=25, deadline=None)
@given(st.lists(findings, max_size=4))
def test_whatever_names_and_messages_hold_is_shown_and_is_no_markup(found: list[Finding]) -> None:
    report = replace(REPORT, findings=tuple(found))
    assert len(sarif(report)["results"]) == len(found)
    assert int(junit(report).get("tests", "")) == len(found) + len(report.checks)
    commands = [line for line in rendered("github", report).splitlines() if line.startswith("::")]
    assert len(commands) == len(found)
    assert rendered("markdown", report).count("\n### ") == len(found)


@pytest.mark.parametrize("name", sorted({*FORMATS} - {"json"}))
def test_each_format_shows_a_new_kind_of_fact_and_escapes_what_its_medium_lacks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "seen before" not in rendered(name, REPORT).lower()
    original = facts_of

    def with_another(finding: Finding) -> list[Fact]:
        return [*original(finding), Fact("history", ("in 3 <b>runs</b>",), "seen before")]

    for module in [module for module in sys.modules.values() if getattr(module, "facts_of", None) is original]:
        monkeypatch.setattr(module, "facts_of", with_another)
    shown = rendered(name, REPORT)
    assert shown.lower().count("seen before") == 2 and shown.count("in 3") == 2
    shown = rendered(name, replace(REPORT, target=ODD, findings=(replace(UNUSED, message=ODD),)), encoding="ascii")
    assert shown.isascii() and "\x1b" not in shown and "\x00" not in shown
