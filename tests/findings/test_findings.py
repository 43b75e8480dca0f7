import json
from pathlib import Path

import pytest

from ddpcheck.findings.errors import FindingsError, UsageError
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location, Report, ReportError, select_findings
from ddpcheck.findings.rules import RULES, Severity
from ddpcheck.render import renderer_for

UNUSED = Finding("DDP101", ("head.weight",), "It is never read.", Severity.ERROR, location=Location("model.py", 25))
ZERO = Finding("DDP107", ("gate",), "Its gradient is zero.", Severity.WARNING, ranks=(1,), steps=(0, 2))
NEEDLESS = Finding("DDP109", (), "Every parameter contributes.", Severity.NOTE)


def test_json_has_the_promised_keys_and_no_others() -> None:
    data = json.loads(Report(target="t", findings=(UNUSED,)).to_json())
    assert set(data) == {
        *("schema_version", "tool", "target", "environment", "world", "status", "checks", "findings", "parity"),
        *("timing", "error", "ignored", "accepted", "modules", "timelines", "curves", "excerpts"),
        "command",
    }
    assert set(data["findings"][0]) == {
        *("code", "name", "severity", "message", "subjects", "ranks", "steps", "location", "evidence", "fix"),
        *("path", "related"),
    }
    assert data["findings"][0]["name"] == "unused-parameter"
    assert data["findings"][0]["fix"] == RULES["DDP101"].fix
    unknown = Finding("DDP999", (), "From a later version.", Severity.ERROR)
    assert [f.what_to_do for f in (replace(UNUSED, fix="Read it."), unknown)] == ["Read it.", ""]


@pytest.mark.parametrize(
    ("report", "status", "code"),
    [
        (Report("t"), "clean", 0),
        (Report("t", findings=(ZERO, NEEDLESS)), "findings", 0),
        (Report("t", findings=(UNUSED,)), "findings", 1),
        (Report("t", findings=(UNUSED,), error=ReportError("no", 3)), "error", 3),
        (Report("t", error=ReportError("no", 4)), "hang", 4),
    ],
)
def test_status_and_exit_code(report: Report, status: str, code: int) -> None:
    assert (report.status, report.exit_code(), report.ok) == (status, code, code == 0)
    warned = Report("t", findings=(ZERO,))
    assert [warned.exit_code(severity) for severity in (*Severity, None)] == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("select", "ignore", "left"),
    [
        ((), (), ["DDP101", "DDP107", "DDP109"]),
        (("ddp10",), ("DDP107",), ["DDP101", "DDP109"]),
        (("DDP101",), ("DDP1",), ["DDP101"]),
        (("zero-gradient-parameter",), ("DDP10",), ["DDP107"]),
        (("DDP3",), (), []),
    ],
)
def test_select_and_ignore_take_codes_prefixes_and_names_and_the_longer_wins(select, ignore, left) -> None:
    chosen = select_findings([NEEDLESS, ZERO, UNUSED], select=select, ignore=ignore)
    assert [finding.code for finding in chosen] == left


def test_a_report_is_printed_shown_in_a_notebook_and_saved_by_extension(tmp_path: Path) -> None:
    report = Report("net.py", findings=(UNUSED, ZERO))
    assert repr(report) == "<Report on net.py: 2 findings (DDP101, DDP107)>"
    assert str(report) == renderer_for("text").render(report).rstrip("\n") and "\x1b" not in str(report)
    assert "&lt;html" in report._repr_html_() and "DDP101" in report._repr_html_()
    for name, form in (("r.json", "json"), ("r.html", "html"), ("r.sarif", "sarif")):
        report.save(tmp_path / name)
        assert (tmp_path / name).read_text(encoding="utf-8") == renderer_for(form).render(report)
    with pytest.raises(UsageError, match="the format from the name"):
        report.save(tmp_path / "report.pdf")
    Report("t", findings=(ZERO,)).raise_for_findings()
    with pytest.raises(FindingsError, match=r"^ddpcheck on net.py: DDP101 unused-parameter head.weight: It is never"):
        report.raise_for_findings()
    with pytest.raises(AssertionError, match=r"^ddpcheck on t: The rank is gone"):
        Report("t", error=ReportError("The rank is gone.", 3)).raise_for_findings()
