"""What a report says has a length that can be read, in text and in JSON, and nothing is said twice."""

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import CheckResult, Finding, Location, ParityEntry, Report, ReportError
from ddpcheck.findings.rules import Severity
from ddpcheck.findings.wording import shorten, shorten_texts
from ddpcheck.render import renderer_for
from ddpcheck.report.matrix.matrix import Matrix, MatrixRow
from ddpcheck.worlds.failures import rank_error as error_of

HUGE = "x" * 9_000_000
FOUND = Finding("DDP401", (HUGE,), HUGE, Severity.ERROR, (0,), (), Location("net.py", 1), (HUGE,) * 3, HUGE)


def test_every_text_of_a_report_is_limited_and_a_short_report_is_the_same() -> None:
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("a" * 6 + "b" * 91 + "c" * 3, 9) == "a" * 6 + " ... 91 characters left out ... " + "c" * 3
    report = Report(
        "net.py",
        world={"notes": [HUGE], "steps": 3},
        checks=(CheckResult("model", "error", detail=HUGE),),
        findings=(FOUND,),
        parity=(ParityEntry(0, HUGE, "local", 0.0, 1.0),),
        error=ReportError(HUGE, 3, HUGE),
    )
    lengths = [len(renderer_for(name).render(report)) for name in ("text", "json")]
    assert lengths[0] < 60_000 < lengths[1], "what is rendered as JSON comes back the same"
    short = shorten_texts(report)
    assert len(short.to_json()) < 70_000 and short.to_json().count("characters left out") == 11
    assert shorten_texts(short) == short or len(shorten_texts(short).to_json()) < 70_000
    small = replace(report, world={}, checks=(), findings=(), parity=(), error=ReportError("no", 3, "why"))
    assert shorten_texts(small) is small
    assert len(shorten_texts(Matrix("t", (MatrixRow({}, "stops", reason=HUGE, findings=(FOUND,)),))).to_json()) < 20_000


def failure(rank: int, text: str = "no", output: str = "") -> RankFailure:
    shown = f'Traceback (most recent call last):\n  File "net.py", line 3, in loss\nValueError: {text}\n'
    return RankFailure(
        rank, "raised", f"rank {rank} raised ValueError: {text}", 1.0, "ValueError", shown, output=output
    )


def test_ranks_that_agree_have_one_traceback_and_the_message_stands_in_it_once() -> None:
    detail = error_of([failure(0), failure(1), failure(2)]).detail
    assert detail.count("Traceback") == detail.count("ValueError: no") == 1 and detail.startswith("[ranks 0 to 2]")
    detail = error_of([failure(0), failure(1, "else"), failure(2)]).detail
    assert detail.count("Traceback") == 2 and "[ranks 0 and 2]\n" in detail and "[rank 1]\n" in detail
    assert error_of([failure(0, output="same\n"), failure(1, output="same\n")]).detail.endswith("output:\nsame")
    detail = error_of([failure(0, output="this"), failure(1, output="that")]).detail
    assert detail.endswith("output of rank 0:\nthis\noutput of rank 1:\nthat")
