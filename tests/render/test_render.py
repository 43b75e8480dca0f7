import io
import re

import pytest

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import CheckResult, Finding, Location, ParityEntry, Report, ReportError
from ddpcheck.findings.rules import RULES, Severity
from ddpcheck.render import FORMATS, MATRIX_FORMATS, Medium, format_for, renderer_for
from tests.findings.test_tracebacks import WHOLE

UNUSED = Finding(
    "DDP101",
    ("head.bias", "head.weight"),
    "2 parameters require grad and no operation reads them.",
    Severity.ERROR,
    ranks=(1,),
    steps=(0, 2),
    location=Location("model.py", 25),
    evidence=("the next forward raises",),
)
COUPLED = Finding("DDP304", ("bn1",), "Gradients differ by 59 %.", Severity.WARNING, fix="Use GroupNorm.")
REPORT = Report(
    target="examples/net.py",
    environment={"torch": "2.13.0", "python": "3.11.7"},
    world={"world_size": 2, "backend": "gloo", "device": "cpu", "steps": 3, "notes": ["Ranks share one GPU."]},
    checks=(
        CheckResult("consistency", "passed", 0.41, "24 parameters"),
        CheckResult("parameters", "failed", 1.2, "2 missing"),
        CheckResult("parity", "skipped"),
    ),
    findings=(COUPLED, UNUSED),
    parity=(
        ParityEntry(0, "conv.weight", "local", 0.0, 3e-6),
        ParityEntry(0, "conv.weight", "single-process", 0.59, 3e-6),
        ParityEntry(1, "fc.weight", "local", 1e-7, 3e-6),
    ),
    tool={"name": "ddpcheck", "version": "0.1.0"},
)


def as_text(report: Report, **medium) -> str:
    return renderer_for("text", medium=Medium(**medium)).render(report)


def test_a_report_as_a_log_shows_it() -> None:
    assert (
        as_text(REPORT)
        == f"""\
ddpcheck 0.1.0 report on examples/net.py
  2 ranks · gloo · cpu · 3 steps
  python 3.11.7 · torch 2.13.0

checks
  ✓  consistency  0.41 s  24 parameters
  ✗  parameters   1.20 s  2 missing
  -  parity

DDP101 unused-parameter  error
  head.bias, head.weight
  2 parameters require grad and no operation reads them.
  at model.py:25, on rank 1, in steps 0 and 2
    the next forward raises
  fix: {RULES["DDP101"].fix}

DDP304 batch-coupled  warning
  bn1
  Gradients differ by 59 %.
  on every rank
  fix: Use GroupNorm.

gradients against each reference, worst parameter
  reference       parameter    step  relative error  allowed  compared
  local           fc.weight       1         1.0e-07  3.0e-06         2
  single-process  conv.weight     0         5.9e-01  3.0e-06         1

note: Ranks share one GPU.

2 findings (1 error, 1 warning); more on each: ddpcheck explain DDP101 DDP304
"""
    )


def test_the_last_line_has_the_codes_in_the_order_of_the_findings() -> None:
    def last_line(*codes: str) -> str:
        found = (*(replace(UNUSED, code=code) for code in codes), COUPLED)
        return as_text(replace(REPORT, findings=found)).splitlines()[-1]

    assert last_line("DDP501", "DDP501").endswith("explain DDP501 DDP304")
    assert last_line("DDP501", "DDP310", "DDP405").endswith("explain DDP310 DDP405 DDP501 DDP304")
    assert last_line("DDP501", "DDP310", "DDP405", "DDP101").endswith("explain DDP101 DDP310 DDP405 DDP501 ...")


def test_a_clean_report_ends_with_a_clean_verdict() -> None:
    checks = (CheckResult("model", "passed"), CheckResult("parity", "passed"))
    text = as_text(replace(REPORT, findings=(), checks=checks))
    assert text.splitlines()[-1] == "clean: 2 checks passed, no findings"


PASSED, UNMADE = CheckResult("model", "passed"), CheckResult("parity", "skipped", detail="not reached")
UNASKED = replace(UNMADE, name="reducer", asked=False)


@pytest.mark.parametrize(
    ("checks", "findings", "ignored", "status", "verdict"),
    [
        ((PASSED, UNMADE), (), (), "incomplete", "no findings, but 1 of 2 checks was not made: parity"),
        ((PASSED, UNASKED), (), (), "clean", "clean: 1 check passed, no findings"),
        ((PASSED,), (), ("DDP305",), "ignored", "no findings; 1 finding ignored (DDP305)"),
        (
            (PASSED, UNMADE, UNASKED),
            (),
            ("DDP101", "DDP101"),
            "incomplete",
            "no findings, but 1 of 2 checks was not made: parity; 2 findings ignored (DDP101)",
        ),
        (
            (PASSED, UNMADE, UNMADE),
            (COUPLED,),
            ("DDP101",),
            "findings",
            "1 finding (1 warning), but 2 of 3 checks were not made: parity, parity; 1 finding ignored (DDP101); "
            "more on each: ddpcheck explain DDP304",
        ),
        ((PASSED, UNMADE), (UNUSED,), (), "findings", "1 finding (1 error); more on each: ddpcheck explain DDP101"),
    ],
)
def test_a_verdict_is_clean_only_where_all_that_was_asked_for_was_made_and_held(
    checks, findings, ignored, status: str, verdict: str
) -> None:
    report = replace(REPORT, checks=checks, findings=findings, ignored=ignored)
    assert as_text(report).splitlines()[-1] == verdict
    assert (report.status, report.exit_code()) == (status, int(findings == (UNUSED,)))
    assert Report.from_json(report.to_json()) == report


@pytest.mark.parametrize("findings", [(), (UNUSED,)])
def test_a_report_that_stopped_says_so_last_and_keeps_what_was_found(findings) -> None:
    error = ReportError("model() raised ValueError: no", 3, "Traceback\n  File 'net.py', line 3\nValueError: no")
    text = as_text(replace(REPORT, findings=findings, error=error))
    assert text.splitlines()[-1].startswith("stopped: model() raised ValueError: no")
    assert "  ValueError: no" in text
    assert ("DDP101" in text) == bool(findings) == ("(1 finding until then)" in text)


def test_a_report_without_anything_renders() -> None:
    assert as_text(Report("t")) == "ddpcheck report on t\n\nclean: 0 checks passed, no findings\n"


def test_names_are_data_not_markup() -> None:
    for name in ("[red]x[/red]", "[bold", "a\\[b]", ":smile:", "layer.0", "[link=x]y"):
        finding = replace(UNUSED, subjects=(name,), message=f"about {name}", evidence=(name,), fix=name)
        report = replace(REPORT, target=name, findings=(finding,), parity=(ParityEntry(0, name, "l", 0, 1),))
        assert as_text(report).count(name) == as_text(report, colour=True).count(name) == 6


def test_control_characters_in_names_are_shown_not_obeyed() -> None:
    text = as_text(replace(REPORT, findings=(replace(UNUSED, subjects=("\x1b[2Jx\r\u2028y",)),)))
    assert "\x1b" not in text and "\r" not in text
    assert r"\x1b[2Jx\r\u2028y" in text


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_a_name_of_two_lines_makes_no_line_of_its_own(form: str) -> None:
    name = "layer\n== clean: no findings"
    found = replace(UNUSED, subjects=(name,), message=f"{name} is unused.", evidence=(name,))
    report = replace(REPORT, findings=(found,), parity=(ParityEntry(0, name, "local", 0.5, 1e-6),))
    text = renderer_for(form).render(report)
    assert "clean: no findings" in text and not re.search("^ *== clean", text, re.MULTILINE)


def test_ascii_and_no_colour_where_the_stream_cannot_show_more() -> None:
    text = as_text(replace(REPORT, target="modèle.py"), encoding="ascii")
    assert text.isascii() and "ok    consistency" in text and "FAIL  parameters" in text and r"mod\xe8le.py" in text
    assert "\x1b[" in as_text(REPORT, colour=True) and "\x1b[" not in as_text(REPORT)


@pytest.mark.parametrize("width", [40, 60, 100])
def test_lines_stay_within_the_width_and_lose_nothing(width: int) -> None:
    finding = replace(UNUSED, subjects=("a" * 150,), message="word " * 60 + "end")
    report = replace(REPORT, findings=(finding,), parity=(ParityEntry(0, "p" * 90, "local", 0.5, 1e-6),))
    text = as_text(report, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("a" * 30) >= 1 and sum(line.count("a") for line in text.splitlines()) >= 150
    assert text.count("word") == 60


def test_names_in_narrow_columns_break_after_dots() -> None:
    name = "encoder.layers.11.self_attention.output_projection.weight"
    lines = as_text(replace(REPORT, parity=(ParityEntry(0, name, "local", 0.5, 1e-6),)), width=80)
    for part in ("encoder.layers.11. ", "self_attention.\n", "output_projection.\n", "weight\n"):
        assert part in lines
    assert name in as_text(replace(REPORT, parity=(ParityEntry(0, name, "local", 0.5, 1e-6),)))


def test_a_traceback_shows_the_users_frames_and_debug_shows_all() -> None:
    report = replace(REPORT, error=ReportError("It raised.", 3, WHOLE))
    assert "  ... 3 frames of torch and Python\n" in as_text(report) and "_call_impl" not in as_text(report)
    assert "_call_impl" in as_text(report, whole=True)
    long = replace(REPORT, error=ReportError("It raised.", 3, "line\n" * 99))
    assert "59 lines before these" in as_text(long) and "before these" not in as_text(long, whole=True)


def test_long_lists_are_shortened_with_a_count_in_text_and_complete_in_json() -> None:
    subjects = tuple(f"layer{n:03}.weight" for n in range(45))
    finding = replace(UNUSED, subjects=subjects, evidence=tuple(f"fact {n}" for n in range(50)))
    report = replace(REPORT, findings=tuple(replace(finding, ranks=(n,)) for n in range(60)))
    text = as_text(report)
    assert "layer007.weight and 37 more" in text and "layer008.weight" not in text
    assert "and 34 more lines" in text and "fact 20" not in text
    assert "and 10 more findings" in text
    assert "60 findings (60 errors)" in text
    assert "layer044.weight" in renderer_for("json").render(report)


def test_ranks_are_told_in_words() -> None:
    for ranks, words in {
        (): "on every rank",
        (0,): "on rank 0",
        (0, 1): "on ranks 0 and 1",
        (3, 1, 5): "on ranks 1, 3 and 5",
        (0, 1, 2, 3): "on ranks 0 to 3",
        (0, 1, 2, 3, 9, 11): "on ranks 0 to 3, 9 and 11",
    }.items():
        text = as_text(Report("t", findings=(replace(UNUSED, ranks=ranks, steps=(), location=None),)))
        assert f"\n  {words}\n" in text


def test_an_error_that_is_not_a_number_is_the_worst() -> None:
    entries = (ParityEntry(0, "a", "local", 0.9, 1e-6), ParityEntry(0, "b", "local", float("nan"), 1e-6))
    assert "nan" in as_text(Report("t", parity=entries))


def test_an_unknown_code_from_elsewhere_still_renders() -> None:
    assert "DDP999" in as_text(Report("t", findings=(replace(UNUSED, code="DDP999"),)))


def test_json_is_what_the_report_says_and_stays_json_in_ascii() -> None:
    report = replace(REPORT, target="modèle 𝄞")
    for encoding in ("utf-8", "ascii"):
        text = renderer_for("json", medium=Medium(encoding=encoding)).render(report)
        text.encode(encoding)
        back = Report.from_json(text)
        assert back == replace(report, world=back.world)


def test_the_extension_chooses_the_format_and_an_unknown_one_is_refused_with_the_known_ones() -> None:
    for path, name in (("r.json", "json"), ("dir.x/r.JSON", "json"), ("r.txt", "text"), ("r.md", "markdown")):
        assert format_for(None, path=path) == name
    assert (format_for(None, path="r.sarif"), format_for(None, path="r.xml")) == ("sarif", "junit")
    for name, path in ((None, "r.pdf"), (None, "report"), ("yaml", None)):
        with pytest.raises(UsageError, match="json"):
            format_for(name, path=path)
    with pytest.raises(UsageError, match="there is no format 'sarif'"):
        format_for("sarif", path=None, formats=MATRIX_FORMATS)


def test_every_format_ends_with_one_newline() -> None:
    for name in FORMATS:
        text = renderer_for(name).render(REPORT)
        assert text.endswith("\n") and not text.endswith("\n\n"), name


class Stream(io.StringIO):
    def __init__(self, terminal: bool, encoding: str | None = "utf-8") -> None:
        super().__init__()
        self._terminal, self._encoding = terminal, encoding

    def isatty(self) -> bool:
        return self._terminal

    @property
    def encoding(self) -> str | None:
        return self._encoding


def test_a_stream_is_asked_for_colour() -> None:
    for terminal, environ, colour in (
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ):
        assert Medium.detect(Stream(terminal), environ).colour is colour, (terminal, environ)


def test_a_stream_is_asked_for_width_and_encoding() -> None:
    assert Medium.detect(Stream(False), {}).width is None
    assert Medium.detect(Stream(False), {"COLUMNS": "72"}).width == 72
    assert Medium.detect(Stream(True), {"COLUMNS": "5"}).width == 40
    assert Medium.detect(Stream(False, None), {}).encoding == "ascii"
    assert not Medium(encoding="no-such-encoding").shows("x")
    assert Medium.detect(Stream(False)).width is None  # in the tests, and in workers of xdist too
