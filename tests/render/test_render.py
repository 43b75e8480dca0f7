import io
import re

import pytest

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import CheckResult, Finding, Location, ParityEntry, Report, ReportError
from ddpcheck.findings.rules import RULES, Severity
from ddpcheck.render import MATRIX_FORMATS, Medium, format_for, renderer_for
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


PASSED, UNMADE = CheckResult("model", "passed"), CheckResult("parity", "skipped", detail="not reached")
UNASKED = replace(UNMADE, name="reducer", asked=False)


def test_a_verdict_is_clean_only_where_all_that_was_asked_for_was_made_and_held() -> None:
    unmade = "but 1 of 2 checks was not made: parity"
    for checks, findings, ignored, status, verdict in (
        ((), (), (), "clean", "clean: 0 checks passed, no findings"),
        ((PASSED, UNMADE), (), (), "incomplete", f"no findings, {unmade}"),
        ((PASSED, UNASKED), (), (), "clean", "clean: 1 check passed, no findings"),
        ((PASSED,), (), ("DDP305",), "ignored", "no findings; 1 finding ignored (DDP305)"),
        (
            *((PASSED, UNMADE), (COUPLED,), ("DDP101", "DDP101"), "findings"),
            f"1 finding (1 warning), {unmade}; 2 findings ignored (DDP101); more on each: ddpcheck explain DDP304",
        ),
        ((PASSED, UNMADE), (UNUSED,), (), "findings", "1 finding (1 error); more on each: ddpcheck explain DDP101"),
    ):
        report = replace(REPORT, checks=checks, findings=findings, ignored=ignored)
        assert as_text(report).splitlines()[-1] == verdict
        assert (report.status, report.exit_code()) == (status, int(findings == (UNUSED,)))
        assert Report.from_json(report.to_json()) == report
    many = tuple(replace(UNUSED, code=code) for code in ("DDP501", "DDP310", "DDP405", "DDP101", "DDP999"))
    text = as_text(replace(REPORT, findings=(*many, COUPLED)))
    assert text.splitlines()[-1].endswith("explain DDP101 DDP310 DDP405 DDP501 ...") and "DDP999" in text


def test_names_are_data_not_markup_or_lines_or_controls() -> None:
    for name in ("[red]x[/red]", "[bold", "a\\[b]", ":smile:", "[link=x]y"):
        finding = replace(UNUSED, subjects=(name,), message=f"about {name}", evidence=(name,), fix=name)
        report = replace(REPORT, target=name, findings=(finding,), parity=(ParityEntry(0, name, "l", 0, 1),))
        assert as_text(report).count(name) == as_text(report, colour=True).count(name) == 6
    name = "layer\n== clean: no findings\x1b[2Jx\r\u2028y"
    finding = replace(UNUSED, subjects=(name,), message=f"{name} is unused.", evidence=(name,))
    report = replace(REPORT, findings=(finding,), parity=(ParityEntry(0, name, "local", float("nan"), 1e-6),))
    for form in ("text", "markdown"):
        text = renderer_for(form).render(report)
        assert "clean: no findings" in text and not re.search("^ *== clean", text, re.MULTILINE)
        assert "\x1b" not in text and "\r" not in text
    assert r"\x1b[2Jx\r\u2028y" in as_text(report) and "nan" in as_text(report)


@pytest.mark.parametrize("findings", [(), (UNUSED,)])
def test_a_report_that_stopped_says_so_last_and_keeps_what_was_found(findings) -> None:
    error = ReportError("model() raised ValueError: no", 3, "Traceback\n  File 'net.py', line 3\nValueError: no")
    text = as_text(replace(REPORT, findings=findings, error=error))
    assert text.splitlines()[-1].startswith("stopped: model() raised ValueError: no")
    assert "  ValueError: no" in text
    assert ("DDP101" in text) == bool(findings) == ("(1 finding until then)" in text)


def test_ascii_and_no_colour_where_the_stream_cannot_show_more() -> None:
    text = as_text(replace(REPORT, target="modèle.py"), encoding="ascii")
    assert text.isascii() and "ok    consistency" in text and "FAIL  parameters" in text and r"mod\xe8le.py" in text
    assert "\x1b[" in as_text(REPORT, colour=True) and "\x1b[" not in as_text(REPORT)


@pytest.mark.parametrize("width", [40, 100])
def test_lines_stay_within_the_width_and_lose_nothing(width: int) -> None:
    finding = replace(UNUSED, subjects=("a" * 150,), message="word " * 60 + "end")
    report = replace(REPORT, findings=(finding,), parity=(ParityEntry(0, "p" * 90, "local", 0.5, 1e-6),))
    text = as_text(report, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("a" * 30) >= 1 and sum(line.count("a") for line in text.splitlines()) >= 150
    assert text.count("word") == 60
    name = "encoder.layers.11.self_attention.output_projection.weight"
    text = as_text(replace(REPORT, parity=(ParityEntry(0, name, "local", 0.5, 1e-6),)), width=80)
    assert all(part in text for part in ("encoder.layers.11. ", "self_attention.\n", "output_projection.\n"))


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


class Stream(io.StringIO):
    encoding: str | None = "utf-8"  # type: ignore[assignment]
    isatty = staticmethod(lambda: False)  # type: ignore[assignment]


class Terminal(Stream):
    isatty = staticmethod(lambda: True)  # type: ignore[assignment]


def test_a_stream_is_asked_for_colour_width_and_encoding() -> None:
    for stream, environ, colour in (
        (Terminal, {"NO_COLOR": ""}, True),
        (Stream, {}, False),
        (Terminal, {"NO_COLOR": "1"}, False),
        (Terminal, {"TERM": "dumb"}, False),
        (Stream, {"FORCE_COLOR": "1"}, True),
        (Stream, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ):
        assert Medium.detect(stream(), environ).colour is colour, (stream, environ)
    widths = [Medium.detect(Stream(), environ).width for environ in ({}, {"COLUMNS": "72"})]
    assert widths == [None, 72] and Medium.detect(Terminal(), {"COLUMNS": "5"}).width == 40
    unknown = Stream()
    unknown.encoding = None
    assert Medium.detect(unknown, {}).encoding == "ascii" and not Medium(encoding="no-such-encoding").shows("x")
    assert Medium.detect(Stream()).width is None  # in the tests, and in workers of xdist too
