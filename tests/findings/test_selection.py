"""What counts: suppressions with a reason, and findings that a baseline knows."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ddpcheck import cli
from ddpcheck.cli import run as run_command
from ddpcheck.findings.errors import ConfigError, UsageError
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import AcceptedFinding, CheckResult, Finding, Location, Report, ReportError
from ddpcheck.findings.rules import Severity
from ddpcheck.findings.selection import Suppression, sort_out
from ddpcheck.render import Medium, renderer_for
from ddpcheck.report.checking.check import check
from ddpcheck.report.settings import Settings, load_settings
from ddpcheck.rules.verdict import Verdict, status_of
from ddpcheck.run import script_report
from ddpcheck.run.check_options import add_check_options, settings_from_args
from ddpcheck.run.ending import Ending

AUX = Finding("DDP101", ("aux.bias", "aux.weight"), "Never read.", Severity.ERROR, location=Location("net.py", 7))
HEAD = replace(AUX, subjects=("head.weight",))
BOTH = replace(AUX, subjects=(*AUX.subjects, "head.weight"))
HANG = Finding("DDP402", (), "It hangs.", Severity.ERROR)
WHY = "kept for old checkpoints"
OF_AUX = Suppression("DDP101", WHY, "aux.*")
PASSED = Report("net.py", checks=(CheckResult("parameters", "passed"),))


def sorted_out(*findings: Finding, **options: Any) -> Report:
    return sort_out(findings, "net.py", **options).complete(PASSED)


def notes(report: Report) -> list[str]:
    return list(report.world.get("notes", ()))


def test_a_suppressed_finding_does_not_count_and_keeps_its_reason() -> None:
    report = sorted_out(AUX, HEAD, suppress=[OF_AUX])
    assert report.findings == (HEAD,) and report.accepted == (AcceptedFinding(AUX, "suppression", WHY),)
    report = sorted_out(AUX, suppress=[OF_AUX])
    assert (report.status, report.exit_code()) == ("ignored", 0)
    assert report.summary == "no findings; 1 finding suppressed (DDP101)" and notes(report) == []
    assert sorted_out(HANG, suppress=[Suppression("hang", WHY)]).findings == ()
    assert sorted_out(HANG, suppress=[Suppression("hang", WHY, "aux.*")]).findings == (HANG,)
    with pytest.warns(DeprecationWarning, match="use rule="):
        assert Suppression(code="DDP101", reason=WHY, parameter="aux.*") == OF_AUX
    with pytest.raises(UsageError, match="rule of a suppression must be a text"):
        Suppression(reason=WHY)
    with pytest.raises(UsageError, match=r"suppress must be ddpcheck.Suppression values, not 'DDP101'"):
        check(str(Path(__file__)), suppress=["DDP101"])  # type: ignore[list-item]


COMMENTS = {
    "# ddpcheck: ignore[DDP101] kept for old checkpoints": None,
    "# noqa  # ddpcheck:ignore[DDP304, unused-parameter] kept for old checkpoints": None,
    "# ddpcheck: ignore[DDP304] kept": "ignores DDP304, and the finding there is DDP101",
    "# ddpcheck: ignore[DDP101]": "is not applied: write the reason behind ignore[DDP101]",
    "# ddpcheck: ignore[DDP999] kept": "is not applied: no rule matches 'DDP999'",
    "# ddpcheck finds this": "",
}


@pytest.mark.parametrize(("comment", "note"), COMMENTS.items())
def test_a_comment_at_the_line_of_a_finding_suppresses_it(
    comment: str, note: str | None, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text("\n" * 6 + f"self.head = Linear(4, 1)  {comment}\nself.other = 1\n")
    report = sorted_out(AUX)
    if note is None:
        assert report.accepted == (AcceptedFinding(AUX, "suppression", WHY),) and notes(report) == []
    else:
        assert report.findings == (AUX,)
        assert [f"the comment at net.py:7 {note}" in text for text in notes(report)] == ([True] if note else [])
    assert sorted_out(replace(AUX, location=Location("net.py", 8))).accepted == ()


def test_a_finding_counts_unless_all_of_its_subjects_are_suppressed() -> None:
    report = sorted_out(BOTH, suppress=[OF_AUX])
    assert report.findings == (BOTH,) and "does not match head.weight" in notes(report)[0]
    together = sorted_out(BOTH, suppress=[OF_AUX, Suppression("DDP1", "old head", "head.*")])
    assert together.findings == () and together.accepted[0].reason == f"{WHY}; old head" and notes(together) == []
    assert sorted_out(BOTH, suppress=[OF_AUX, Suppression("DDP402", "x", "head.*")]).findings == (BOTH,)


def test_an_unused_suppression_is_noted_only_where_that_is_known() -> None:
    note = ["the suppression of DDP101 for 'aux.*' matched no finding of this check"]
    assert notes(sorted_out(HEAD, suppress=[OF_AUX])) == note
    assert notes(sorted_out(suppress=[OF_AUX], ignore=["DDP101"])) == []
    assert notes(sorted_out(suppress=[OF_AUX], select=["DDP4"])) == []
    assert notes(sorted_out(suppress=[replace(OF_AUX, target="other.py")])) == []
    selection = sort_out((), "net.py", suppress=[OF_AUX])
    for changes in ({"checks": (CheckResult("parameters", "skipped"),)}, {"error": ReportError("", 3)}):
        assert notes(selection.complete(replace(PASSED, **changes))) == []


def test_a_suppression_may_name_a_target_and_a_file() -> None:
    for target in ("examples/net.py", "./examples/net.py:r", "examples/net.py --epochs 3"):
        suppressions = [Suppression("DDP101", WHY, target=pattern) for pattern in ("examples/*.py", target, "src/*.py")]
        assert [suppression.applies_to(target) for suppression in suppressions] == [True, True, False]
    inside = Suppression("DDP1", WHY, file="n*.py")
    assert sorted_out(AUX, suppress=[inside]).findings == ()
    elsewhere = replace(AUX, location=Location("third_party/net.py", 7))
    report = sorted_out(elsewhere, suppress=[inside])
    assert report.findings == (elsewhere,)
    assert notes(report) == ["the suppression of DDP1 in 'n*.py' matched no finding of this check"]
    assert sorted_out(replace(AUX, location=None), suppress=[inside]).findings != ()


def test_a_baseline_knows_a_fault_where_lines_have_moved_and_part_of_it_is_fixed() -> None:
    baseline = replace(PASSED, findings=(BOTH,))
    moved = replace(HEAD, location=Location("net.py", 99), message="other numbers")
    assert sorted_out(moved, baseline=baseline).accepted == (AcceptedFinding(moved, "baseline", "in the baseline"),)
    assert sorted_out(moved, baseline=baseline).summary == "no findings; 1 finding known (DDP101)"
    for new in (
        replace(HEAD, subjects=("tail",)),
        replace(BOTH, subjects=(*BOTH.subjects, "tail")),
        replace(HEAD, location=Location("other.py", 7)),
        replace(HEAD, code="DDP102"),
    ):
        assert sorted_out(new, baseline=baseline).findings == (new,)
    mild = replace(PASSED, findings=(replace(HEAD, severity=Severity.WARNING),))
    assert sorted_out(HEAD, baseline=mild).findings == (HEAD,), "it has become worse"
    both = replace(PASSED, findings=(HEAD, HANG))
    gone = ["1 finding of the baseline not found any more: DDP101 head.weight"]
    assert notes(sorted_out(HANG, baseline=both)) == gone
    assert notes(sorted_out(HANG, HEAD, baseline=both, ignore=["DDP101"])) == []
    elsewhere = replace(both, target="other.py")
    assert notes(sorted_out(HANG, HEAD, baseline=elsewhere)) == ["the baseline was made of other.py"]


def test_every_form_of_a_report_shows_what_does_not_count() -> None:
    report = sorted_out(AUX, HEAD, suppress=[OF_AUX], baseline=replace(PASSED, findings=(HEAD,)))
    for name in ("text", "markdown"):
        text = re.sub(r"\\(.)", r"\1", renderer_for(name).render(report))
        assert "found, and not counted" in text and WHY in text and "in the baseline" in text
    narrow = renderer_for("text", medium=Medium(width=40)).render(report)
    assert max(map(len, narrow.splitlines())) <= 40
    assert Report.from_json(renderer_for("json").render(report)) == report
    suite = ElementTree.fromstring(renderer_for("junit").render(report)).find("testsuite")
    assert suite is not None and [suite.get(key) for key in ("failures", "skipped")] == ["0", "2"]
    results = json.loads(renderer_for("sarif").render(report))["runs"][0]["results"]
    assert [result["suppressions"][0]["justification"] for result in results] == [WHY, "in the baseline"]
    kept = Verdict(matching="every trainable parameter contributed to the loss in 3 steps")
    assert status_of(kept, [(AUX, AUX)], [])[0] == "ignored"
    assert status_of(kept, [(AUX, AUX), (HEAD, HEAD)], [HEAD])[0] == "failed"


def test_a_clean_script_still_tells_which_suppression_is_unused(tmp_path: Path, monkeypatch, capsys) -> None:
    clean = replace(PASSED, world={"notes": ["the suppression of DDP101 matched no finding of this check"]})
    monkeypatch.setattr(script_report, "report_on_script", lambda *args, **options: clean)
    args = argparse.Namespace(
        **dict.fromkeys(f"check_{name}" for name in ("flight_recorder", "record", "output", "format")),
        debug=False,
        verbose=False,
    )
    output = run_command.report_output(args)
    run_command.show_report("train.py", Ending(), tmp_path, args, output, Settings(), None)
    assert capsys.readouterr().err.splitlines() == [
        "ddpcheck: note: the suppression of DDP101 matched no finding of this check",
        "ddpcheck: clean: ",
    ]


def test_the_settings_of_a_project_hold_for_a_script(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.ddpcheck]\nignore = ["DDP802"]\nfail_on = "note"\n')
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser(prog="ddpcheck run")
    add_check_options(parser)
    settings = settings_from_args(parser.parse_args([]))
    assert (settings.ignore, settings.fail_on) == (("DDP802",), Severity.NOTE)
    settings = settings_from_args(parser.parse_args(["--check-ignore", "DDP1", "--check-fail-on", "never"]))
    assert (settings.ignore, settings.fail_on) == (("DDP1",), None)


TABLE = f"[[tool.ddpcheck.suppress]]\ncode = 'DDP101'\nparameter = 'aux.*'\nreason = '{WHY}'\n"
WRONG_TABLES = {
    "code = 'DDP101'": "table 1 needs a 'reason'",
    "reason = 'x'": "table 1 needs a 'rule'",
    "code = 'DDP101'\nreason = ' '": "table 1: reason of a suppression must be a text that is not empty, not ' '",
    "code = 'DDP101'\nreason = 'x'\nparam = 'a'": "table 1 has no key 'param'; did you mean 'parameter'?",
    "code = 'unused-paramter'\nreason = 'x'": "table 1: no rule matches 'unused-paramter'; did you mean DDP101",
}


def test_suppressions_are_read_from_tables_and_a_wrong_table_is_named(tmp_path: Path) -> None:
    for table, message in WRONG_TABLES.items():
        (tmp_path / "pyproject.toml").write_text(f"[[tool.ddpcheck.suppress]]\n{table}\n")
        with pytest.raises(ConfigError, match=f"'suppress' in .* of .*pyproject.toml: {re.escape(message)}"):
            load_settings(environ={}, start=tmp_path)
    (tmp_path / "pyproject.toml").write_text(TABLE)
    assert load_settings(environ={}, start=tmp_path).suppress == (OF_AUX,)
    with pytest.raises(ConfigError, match="DDPCHECK_SUPPRESS: expected tables"):
        load_settings(environ={"DDPCHECK_SUPPRESS": "DDP101"}, start=tmp_path)


RECIPE = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.aux = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    def forward(self, x):
        return self.body(x)
model = Net
def batch(step):
    return torch.arange(16.0).reshape(4, 4)
def loss(model, batch):
    return model(batch).square().mean()
"""


def test_suppressions_and_baselines_reach_a_check(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(RECIPE)
    assert cli.main(["report", "net.py", "-o", "old.json"]) == 1
    assert cli.main(["report", "net.py", "--baseline", "old.json"]) == 0
    verdict = "no findings, but 1 of 6 checks was not made: reducer; 1 finding known (DDP101)"
    assert verdict in capsys.readouterr().out
    Path("pyproject.toml").write_text(f"{TABLE}target = 'net.py'\n")
    assert cli.main(["report", "net.py", "--select", "DDP101", "-o", "new.json"]) == 0
    report = Report.from_json(Path("new.json").read_text())
    assert report.status == "ignored" and [accepted.reason for accepted in report.accepted] == [WHY]
    assert {check.name: check.status for check in report.checks}["parameters"] == "ignored"
    Path("x.json").write_text("[]")
    assert cli.main(["report", "nowhere.py", "--baseline", "x.json"]) == 2
    assert "ddpcheck: error: x.json is not a report: this JSON is not a ddpcheck report" in capsys.readouterr().err
