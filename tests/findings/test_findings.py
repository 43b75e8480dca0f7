import json
from pathlib import Path
from typing import get_args

import pytest

pytest.importorskip("hypothesis", reason="hypothesis is not installed")
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpcheck.findings.errors import FindingsError, UsageError
from ddpcheck.findings.figures import (
    CalledCollective,
    CollectiveTimeline,
    ModuleEntry,
    ParameterPath,
    ParityCurve,
    PathStep,
    RankCollectives,
    SourceExcerpt,
)
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import (
    CheckResult,
    CheckStatus,
    Finding,
    Location,
    ParityEntry,
    Report,
    ReportError,
    select_findings,
)
from ddpcheck.findings.rules import RULES, Severity
from ddpcheck.render import FORMATS, Medium, renderer_for
from tests.tiers import one_of

UNUSED = Finding("DDP101", ("head.weight",), "It is never read.", Severity.ERROR, location=Location("model.py", 25))
ZERO = Finding("DDP107", ("gate",), "Its gradient is zero.", Severity.WARNING, ranks=(1,), steps=(0, 2))
NEEDLESS = Finding("DDP109", (), "Every parameter contributes.", Severity.NOTE)

names = st.text(max_size=12)
numbers = st.floats(allow_nan=False, allow_infinity=False)
findings = st.builds(
    Finding,
    code=st.sampled_from(sorted(RULES)),
    subjects=st.lists(names, max_size=3).map(tuple),
    message=names,
    severity=st.sampled_from(Severity),
    ranks=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    steps=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    location=st.none() | st.builds(Location, names, st.integers(0, 999)),
    evidence=st.lists(names, max_size=3).map(tuple),
    fix=names,
    path=st.none() | st.builds(ParameterPath, names, st.sampled_from(["unused", "cut"]), st.just((PathStep("x()"),))),
)
timelines = st.builds(
    CollectiveTimeline,
    names,
    st.just((CalledCollective("barrier", "", "a.py:1"),)),
    st.lists(st.builds(RankCollectives, st.integers(0, 9), st.integers(0, 99), st.just((0, 0))), max_size=3).map(tuple),
    st.none() | st.integers(0, 99),
)
values = st.lists(st.none() | st.floats(-1e99, 1e99), min_size=2, max_size=2).map(tuple)
curves = st.builds(
    ParityCurve,
    names,
    names,
    st.just((3, 9)),
    values,
    values,
    st.none() | st.integers(0, 99),
    st.none() | st.builds(Location, names, st.integers(0, 999)),
)
reports = st.builds(
    Report,
    target=names,
    environment=st.dictionaries(names, names, max_size=2),
    world=st.dictionaries(names, st.integers() | st.lists(names, max_size=2), max_size=2),
    checks=st.lists(
        st.builds(CheckResult, names, st.sampled_from(get_args(CheckStatus)), numbers, names, st.booleans()), max_size=2
    ).map(tuple),
    findings=st.lists(findings, max_size=3).map(tuple),
    ignored=st.lists(st.sampled_from(sorted(RULES)), max_size=3).map(tuple),
    parity=st.lists(st.builds(ParityEntry, st.integers(0, 9), names, names, numbers, numbers), max_size=2).map(tuple),
    timing=st.dictionaries(names, numbers, max_size=2),
    error=st.none() | st.builds(ReportError, names, st.sampled_from([3, 4]), names),
    tool=st.dictionaries(names, names, max_size=2),
    modules=st.lists(st.builds(ModuleEntry, names, names, st.just(("weight",))), max_size=3).map(tuple),
    timelines=st.lists(timelines, max_size=2).map(tuple),
    curves=st.lists(curves, max_size=2).map(tuple),
    command=names,
    excerpts=st.lists(st.builds(SourceExcerpt, names, st.integers(1, 9), st.just(("x",))), max_size=2).map(tuple),
)


@settings(max_examples=len(one_of(4, range(48))))
@given(reports)
def test_a_report_comes_back_from_json_and_can_be_rendered(report: Report) -> None:
    text = report.to_json()
    assert Report.from_json(text) == report and Report.from_json(text).to_json() == text
    for name in FORMATS:
        for encoding in ("utf-8", "ascii"):
            shown = renderer_for(name, medium=Medium(width=60, encoding=encoding)).render(report)
            assert shown.encode(encoding)[-1:] == b"\n"


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
