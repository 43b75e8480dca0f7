"""The HTML page of a report: what stands on it, that names are only text, and that the report comes out again."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpcheck import cli
from ddpcheck.findings import report as reports
from ddpcheck.findings.figures import (
    CalledCollective,
    CollectiveTimeline,
    ModuleEntry,
    ParameterPath,
    ParityCurve,
    PathStep,
    RankCollectives,
    SourceExcerpt,
    excerpts_of,
)
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import AcceptedFinding, Finding, Location, ParityEntry, Report, ReportError
from ddpcheck.findings.rules import Severity
from ddpcheck.render import MATRIX_FORMATS, Medium, renderer_for
from ddpcheck.render.page.page import data_in, visible
from ddpcheck.render.page.sections import merge_ranks
from ddpcheck.report.matrix.matrix import Advice, Matrix, MatrixRow, StepTime
from tests.render.test_render import COUPLED, REPORT, UNUSED

ODD = "<script>alert(1)</script>[red]\x1b[31m&amp;\"'\u202e\x00"
_VOID = ("meta", "path", "line", "rect", "circle", "polyline")


@dataclass
class Page(HTMLParser):
    """A page, parsed: its elements, its text but for styles and data, and its ids."""

    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, text: str) -> Page:
        page = cls()
        HTMLParser.__init__(page)
        page.feed(text)
        page.close()
        assert page.open == []
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _VOID
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def of_class(self, name: str) -> list[tuple[str, dict[str, str | None]]]:
        return [(tag, attrs) for tag, attrs in self.elements if name in (attrs.get("class") or "").split()]


def html(report: Report | Matrix, **medium: Any) -> str:
    formats = {"formats": MATRIX_FORMATS} if isinstance(report, Matrix) else {}
    return renderer_for("html", medium=Medium(**medium), **formats).render(report)


def shown(report: Report | Matrix) -> Page:
    return Page.of(html(report))


CUT = Finding(
    "DDP103",
    ("body.weight",),
    "The path from body.weight to the loss is cut by torch.no_grad() at net.py:9.",
    Severity.ERROR,
    location=Location("net.py", 7),
    related=(reports.RelatedLocation("parameter made", Location("net.py", 4)),),
    path=ParameterPath(
        "body.weight",
        "cut",
        (PathStep("linear()", "body", Location("net.py", 8)), PathStep("relu()", "", Location("net.py", 9))),
        reason="torch.no_grad()",
        begins_at=Location("net.py", 7),
    ),
)
CALLS = (CalledCollective("all_reduce", "float32 of shape (8,)", "train.py:9"), CalledCollective("barrier"))
CAME = RankCollectives(0, 0, (0,) * 30 + (1,), waiting=True, waits_for=(1,), at_end="waits in barrier()")
AT_WORK = RankCollectives(1, 0, (0,) * 30, at_end="at work")
HANG = Report(
    "train.py",
    world={"world_size": 64},
    findings=(Finding("DDP403", ("barrier",), "Rank 1 never came.", Severity.ERROR, ranks=(1,)),),
    timelines=(
        CollectiveTimeline(
            "0", CALLS, tuple(AT_WORK if rank == 1 else replace(CAME, rank=rank) for rank in range(64)), parts_at=30
        ),
    ),
)
MATRIX = Matrix(
    "net.py",
    rows=(
        MatrixRow({}, "stops", own=True, code="DDP101", reason="head.weight is unused.", findings=(UNUSED, COUPLED)),
        MatrixRow({"find_unused_parameters": True}, "right", baseline=True, step_time=StepTime(1, 1, 1, 0.01, 9)),
        MatrixRow({"static_graph": True}, "lossy", error=1e-3, step_time=StepTime(1.5, 1.4, 1.6, 0.015, 9)),
    ),
    advice=(Advice("needs", "Use find_unused_parameters=True."),),
    world={"world_size": 2},
)


def test_the_verdict_is_that_of_the_report_and_comes_before_the_findings_worst_first() -> None:
    for report, words in (
        (replace(REPORT, findings=(), checks=REPORT.checks[:1]), "Clean"),
        (replace(REPORT, findings=()), "No findings, and not all was checked"),
        (Report("net.py", error=ReportError("The model raised.", 3, "Traceback")), "Stopped"),
        (Report("net.py", findings=(UNUSED,), error=ReportError("Ranks hang.", 4)), "Hang: 1 error"),
    ):
        page = shown(report)
        (verdict,) = page.of_class("verdict")
        assert words in page.text and verdict[1]["role"] == "status"
    text = shown(REPORT).text
    places = [text.index(words) for words in ("1 error, 1 warning", "DDP101 unused-parameter", "DDP304 batch-coupled")]
    assert places == sorted(places)


def test_what_does_not_count_is_shown_with_its_reason() -> None:
    known = AcceptedFinding(UNUSED, "baseline", "in the baseline")
    report = Report("net.py", accepted=(AcceptedFinding(CUT, "suppression", "kept <for> old checkpoints"), known))
    page = shown(report)
    assert "No findings that count" in page.text
    assert "suppressed: kept <for> old checkpoints" in page.text and "known from the baseline" in page.text
    assert CUT.message in page.text and UNUSED.message in page.text


def test_a_finding_shows_its_source_and_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text("".join(f"line = {number}\n" for number in range(1, 13)))
    report = Report("net.py", findings=(CUT,)).with_excerpts()
    assert [(e.first, e.first + len(e.lines) - 1) for e in report.excerpts] == [(4, 10), (6, 12), (1, 7)]
    Path("net.py").unlink()
    page = shown(report)
    assert [lines for lines in page.texts if lines.startswith("line =")].count("line = 7") == 3
    assert len(page.of_class("here")) == 3
    words = ("where torch.no_grad() begins", "where the path ends", ": parameter made", "relu()")
    assert all(word in page.text for word in words)


def test_source_is_looked_for_beside_the_target_and_what_is_none_is_left_out(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("here/net.py", "net.py", "models/blocks.py"):
        (tmp_path / name).write_text("".join(f"{name} = {number}\n" for number in range(1, 13)))
    findings = (replace(UNUSED, location=Location("net.py", 3)), replace(UNUSED, location=Location("blocks.py", 7)))
    for target in (f"{tmp_path}/net.py", f"{tmp_path}/net.py:recipe", f"{tmp_path}/net.py --epochs 3"):
        excerpts = Report(target, findings=findings).with_excerpts().excerpts
        assert {excerpt.lines[0].partition(" ")[0] for excerpt in excerpts} == {"net.py", "models/blocks.py"}
    (excerpt,) = Report("net.py", findings=findings).with_excerpts().excerpts
    assert excerpt.lines[0] == "here/net.py = 1"
    for content in (b"\xff\xfe", b"x\n", b"# coding: none\n" * 9):
        Path("net.py").write_bytes(content)
        assert excerpts_of([Location("net.py", 5), Location(str(tmp_path), 1), Location("\x00", 1), None]) == ()


def test_a_finding_on_ranks_that_part_shows_the_line_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("".join(f"line = {number}\n" for number in range(1, 50)))
    calls = (CalledCollective("barrier", "", "train.py:10"), CalledCollective("all_reduce", "", "train.py:30"))
    ranks = (RankCollectives(0, calls=(0, 0)), RankCollectives(1, calls=(0, 1)), RankCollectives(2, calls=(0, 1)))
    mismatch = Finding("DDP403", ("all_reduce",), "They part.", Severity.ERROR, location=Location("train.py", 30))
    report = Report("train.py", findings=(mismatch,), timelines=(CollectiveTimeline("0", calls, ranks, 1),))
    page = shown(report.with_excerpts())
    assert "line = 30" in page.text and "line = 10" in page.text
    assert "barrier of rank 0" in page.text


def test_modules_are_marked_where_findings_name_them() -> None:
    entries = (("", "Net"), ("head", "Linear"), ("body", "Sequential"), ("body.0", "Linear"))
    modules = tuple(ModuleEntry(name, kind, ("weight", "bias")) for name, kind in entries)
    page = shown(replace(REPORT, findings=(UNUSED, replace(COUPLED, subjects=("body.0",))), modules=modules))
    assert "weight: DDP101" in page.text and "DDP304" in page.text
    assert page.text.count("inside") == 2  # the model, worst of both, and body


def test_gradients_beyond_their_tolerance_are_marked_and_come_first() -> None:
    entries = tuple(ParityEntry(step, f"p{n}", "local", 10.0**-n, 1e-3) for n in range(30) for step in (0, 1))
    odd = (ParityEntry(0, "large", "local", 1e300, 1e-3), ParityEntry(0, "small", "local", 1e-300, 0.0))
    page = shown(replace(REPORT, parity=(*entries, *odd)))
    assert len(page.of_class("beyond")) == 5 and "32 parameters in 2 steps: 5 beyond the tolerance" in page.text


def test_64_ranks_are_two_groups_of_equal_behaviour() -> None:
    page = shown(HANG)
    assert "ranks 0 and 2 to 63 | rank 1" in page.text
    assert sum(tag == "th" for tag, _ in page.elements) == 3  # the number, and two groups
    assert "part here" in page.text and page.text.count("did not end") == 1 and "never came here" in page.text
    assert any("ranks 0 and 2 to 63 waits for rank 1" in (a.get("aria-label") or "") for _, a in page.elements)
    lines = [f"rank {rank}: {'none' if rank == 1 else 'barrier()'}" for rank in range(4)]
    assert merge_ranks([*lines, "loss: 3"]) == ["ranks 0, 2 and 3: barrier()", "rank 1: none", "loss: 3"]


def test_a_page_of_64_ranks_of_which_each_does_otherwise_stays_small() -> None:
    (timeline,) = HANG.timelines
    ranks = tuple(replace(calls, first=calls.rank, at_end=f"{calls.rank} " * 99) for calls in timeline.ranks)
    parity = tuple(ParityEntry(s, f"layer.{n}.weight", "local", 1e-8, 1e-6) for n in range(1000) for s in range(3))
    modules = tuple(ModuleEntry(f"layer.{number}", "Linear", ("weight", "bias"), 64) for number in range(1000))
    findings = tuple(replace(UNUSED, subjects=(f"a{n}",), evidence=("x" * 2000,) * 9) for n in range(300))
    text = html(replace(HANG, timelines=(replace(timeline, ranks=ranks),), parity=parity, modules=modules))
    assert len(text.encode()) < 1_000_000
    assert "200 more findings" in shown(replace(HANG, findings=findings)).text


def test_a_matrix_shows_each_combination_and_what_to_do() -> None:
    text = shown(MATRIX).text
    for words in ("stops", "find_unused_parameters=True", "1.50 (1.40 to 1.60)", "Fix", "rounded by 1.0e-03"):
        assert words in text


BY_STEP = ("norm of the gradients", "optimizer step", (0, 1, 2, 3))
CURVE = ParityCurve(*BY_STEP, (2.0, 1.5, 3.0, 2.5), (2.0, 1.5, 1.0, 0.5), 2, Location("fit.py", 9))


def lines_of(page: Page, class_: str) -> list[list[tuple[float, float]]]:
    """The points of the polylines of a class."""
    lines = [str(attributes["points"]) for tag, attributes in page.of_class(class_) if tag == "polyline"]
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in points.split())] for points in lines]


def test_a_curve_is_drawn_over_that_of_a_single_process_with_its_first_divergence() -> None:
    page = shown(Report("fit.py", curves=(CURVE,)))
    (ranks,), (single,) = lines_of(page, "ranks"), lines_of(page, "single")
    assert [x for x, _ in ranks] == [x for x, _ in single] == sorted({x for x, _ in single})
    assert ranks[:2] == single[:2] and ranks[2][1] < single[2][1] < single[3][1]  # y goes down
    (mark,) = page.of_class("cut")
    assert float(str(mark[1]["x1"])) == float(str(mark[1]["x2"])) == ranks[2][0]
    (picture,) = (a for tag, a in page.elements if tag == "svg" and a.get("role") == "img")
    assert picture["aria-label"] in page.texts
    words = {"ranks", "single process", "optimizer step", "first divergence: optimizer step 2", "fit.py:9"}
    assert words | {"0", "1", "2", "3", "0.5", "1.5", "2.5"} <= {*page.texts}  # with those of both axes
    page = shown(Report("fit.py", curves=(replace(CURVE, ranks=CURVE.single, diverges_at=None),)))
    assert lines_of(page, "ranks") == lines_of(page, "single") and page.of_class("cut") == []
    assert "first divergence" not in page.text and "single process: no divergence" in page.text
    page = shown(Report("fit.py", curves=(replace(CURVE, ranks=(2.0, None, 3.0, 2.5), single=(None,) * 4),)))
    first, last = lines_of(page, "ranks")
    assert len(first) == len(last) == 2 and first[0] != first[1] and lines_of(page, "single") == []
    assert "5 values not drawn" in page.text


FLAT = [(0.0, 0.0), (5e-324, -5e-324), (1e99, -1e99), (1.0, 1.0 + 1e-12)]


def test_flat_tiny_and_huge_curves_stay_in_the_picture() -> None:
    for values, x in itertools.product(FLAT, [(7, 7), (10**9, 10**9 + 3)]):
        curve = ParityCurve("loss", "optimizer step", x, values, (None, values[0]), x[1])
        page = shown(Report("fit.py", curves=(curve,)))
        points = [point for class_ in ("ranks", "single") for line in lines_of(page, class_) for point in line]
        labels = [(float(str(a["x"])), float(str(a["y"]))) for tag, a in page.elements if tag == "text"]
        assert len(points) == 4 and 6 <= len(labels) <= 30, (values, x)
        assert all(0 <= across <= 440 and 0 <= down <= 200 for across, down in points + labels), (values, x)
    assert "loss" in shown(Report("fit.py", curves=(ParityCurve("the loss", "step", (), (), ()),))).text


@pytest.mark.parametrize("report", [REPORT, HANG, MATRIX], ids=["report", "hang", "matrix"])
def test_a_page_asks_for_nothing_and_has_landmarks_and_targets(report: Report | Matrix) -> None:
    page = shown(report)
    tags = [tag for tag, _ in page.elements]
    assert {"header", "nav", "main", "footer", "h1"} <= set(tags) and tags.count("script") == 1
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.elements:
        assert not {"src", "onclick", "onload", "style"} & attributes.keys(), tag
        if "href" in attributes:
            assert str(attributes["href"])[:1] == "#" and str(attributes["href"])[1:] in ids
        assert attributes.get("aria-labelledby") in (None, *ids)
    assert "url(" not in html(report) and "@import" not in html(report)


text = st.text(st.characters(), max_size=30) | st.sampled_from([ODD, "</script>", "<!--", "]]>", "[red]", "\x1b[31m"])


@settings(max_examples=30, deadline=None)
@given(text, text)
def test_whatever_names_and_messages_hold_is_shown_and_is_no_element(name: str, message: str) -> None:
    plain = [tag for tag, _ in shown(_named("a", "b")).elements]
    report = _named(name, message)
    page = shown(report)
    assert [tag for tag, _ in page.elements] == plain
    seen = page.text
    assert seen.count(visible(message)) >= 1 and seen.count(visible(name)) >= 1
    assert not any(not c.isprintable() and c != "\n" for c in seen)
    assert Report.from_json(str(data_in(html(report)))) == report
    assert Report.from_json(str(data_in(html(report, encoding="ascii")))) == report


def _named(name: str, message: str) -> Report:
    path = ParameterPath(name, "cut", (PathStep(name, name, Location(f"a{name}", 3)),), reason=message)
    finding = replace(UNUSED, subjects=(f"a.{name}",), message=message, evidence=(f"x {message}",), path=path)
    calls = (CalledCollective(f"f{name}", message, f"a.py{name}:3"),)
    return replace(
        REPORT,
        target=f"t{name}",
        findings=(finding,),
        parity=(ParityEntry(0, f"p{name}", "local", 0.1, 0.2),),
        modules=(ModuleEntry("a", f"C{message}", ("w",), 3),),
        curves=(replace(CURVE, name=name, x_label=message, location=Location(f"a{name}", 3)),),
        timelines=(CollectiveTimeline(name, calls, (RankCollectives(0, 0, (0,), at_end=f"in {message}"),)),),
        excerpts=(SourceExcerpt(f"a{name}", 1, ("x", f"y{message}".replace("\n", " "), "z")),),
    )


OPENING = 'zlib" id="ddpcheck-data">'


def test_a_page_is_read_again_and_one_that_is_damaged_is_refused(tmp_path: Path, capsys) -> None:
    path = tmp_path / "report.html"
    for report in (MATRIX, replace(HANG, target="x" * 300_000)):
        whole = html(report)
        path.write_text(whole, encoding="utf-8")
        assert cli.main(["render", str(path), "--format", "json"]) == 0
        assert type(report).from_json(capsys.readouterr().out) == report
    for damaged, words in (
        (whole.replace("ddpcheck-data", "other"), ("it is not JSON", "Expecting value", "not a report")),
        (whole.replace(OPENING, f"{OPENING}eJ"), ("damaged", "not whole")),
    ):
        path.write_text(damaged, encoding="utf-8")
        assert cli.main(["render", str(path)]) == 2
        message = capsys.readouterr().err
        assert any(word in message for word in words), message


def test_a_timeline_that_names_calls_that_are_not_there_is_refused() -> None:
    (timeline,) = HANG.timelines
    data = HANG.to_json().replace('"calls": [\n        {', '"calls": [], "others": [\n        {', 1)
    with pytest.raises(ValueError, match="not in the list of its timeline"):
        Report.from_json(data)
    with pytest.raises(ValueError, match="not in the list"):
        replace(timeline, calls=())
