"""`ddpcheck diff`: what is new, fixed and remaining."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpcheck import cli
from ddpcheck.findings.difference import compare_reports
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import AcceptedFinding, CheckResult, Finding, Location, Report, ReportError
from ddpcheck.findings.rules import Severity
from ddpcheck.render import DIFFERENCE_FORMATS, Medium, renderer_for

AUX = Finding("DDP101", ("aux.weight",), "Never read.", Severity.ERROR, location=Location("net.py", 7))
HEAD = replace(AUX, subjects=("head.weight",))
ZERO = Finding("DDP107", ("gate",), "Its gradient is zero.", Severity.WARNING)
OLD = Report("net.py", checks=(CheckResult("parameters", "failed"),), findings=(AUX, ZERO))


def later(*findings: Finding, **changes) -> Report:
    return replace(OLD, findings=findings, **changes)


def test_findings_are_new_fixed_or_remain() -> None:
    moved = replace(AUX, location=Location("net.py", 80))
    found = compare_reports(OLD, later(HEAD, moved))
    assert (found.added, found.fixed, found.remaining, found.open) == ((HEAD,), (ZERO,), (moved,), ())
    assert found.summary == "1 new, 1 fixed, 1 remaining" and found.exit_code() == 1
    assert compare_reports(OLD, OLD).summary == "2 remaining"
    assert compare_reports(later(), later()).summary == "no findings in either report"
    new = compare_reports(later(), OLD)
    assert [new.exit_code(level) for level in (Severity.ERROR, Severity.WARNING, None)] == [1, 1, 0]
    assert compare_reports(OLD, later(AUX)).exit_code(Severity.NOTE) == 0
    accepted = (AcceptedFinding(AUX, "suppression", "why"), AcceptedFinding(HEAD, "suppression", "why"))
    assert compare_reports(OLD, later(accepted=accepted)).summary == "1 fixed, 1 remaining"
    assert compare_reports(later(accepted=accepted), later(AUX)).remaining == (AUX,)


@pytest.mark.parametrize(
    "changes",
    [
        {"ignored": ("DDP101", "DDP107")},
        {"checks": (CheckResult("parameters", "skipped"),)},
        {"error": ReportError("", 3)},
    ],
)
def test_nothing_is_called_fixed_that_was_not_looked_for(changes) -> None:
    found = compare_reports(OLD, later(**changes))
    assert (found.fixed, found.open) == ((), (AUX, ZERO))
    assert found.exit_code() == (3 if "error" in changes else 0)


def test_every_form_shows_all_of_it() -> None:
    found = compare_reports(OLD, later(HEAD, AUX, target="[red]other"), names=("a.json", "b.json"))
    for name in DIFFERENCE_FORMATS:
        text = renderer_for(name, formats=DIFFERENCE_FORMATS, medium=Medium(encoding="ascii")).render(found)
        assert all(part in text.replace("\\", "") for part in ("head.weight", "aux.weight", "gate", "[red]other"))
    assert json.loads(found.to_json())["kind"] == "difference"
    text = renderer_for("text", formats=DIFFERENCE_FORMATS, medium=Medium(width=60)).render(found)
    assert max(map(len, text.splitlines())) <= 60


def test_diff_on_the_command_line(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.json").write_text(OLD.to_json())
    Path("new.json").write_text(later(HEAD).to_json())
    assert cli.main(["diff", "old.json", "new.json"]) == 1
    assert capsys.readouterr().out.endswith("1 new, 2 fixed\n")
    assert cli.main(["diff", "new.json", "new.json", "--fail-on", "note"]) == 0
    assert cli.main(["diff", "old.json", "new.json", "-o", "d.md"]) == 1
    assert Path("d.md").read_text().startswith("## ddpcheck diff: 1 new, 2 fixed")
    Path("matrix.json").write_text('{"kind": "matrix", "schema_version": 1, "target": "t", "rows": [], "advice": []}')
    assert cli.main(["diff", "old.json", "matrix.json"]) == 2
    assert cli.main(["diff", "old.json", "none.json"]) == 2
    assert "cannot read none.json" in capsys.readouterr().err
