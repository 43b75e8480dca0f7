"""What texts, Markdown, pages and other formats say of a report: a fact comes from here, a format only shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from ddpcheck.findings.report import AcceptedFinding, Finding, Report, Severity
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import counted, format_place
from ddpcheck.report.matrix.matrix import Matrix


class Fact(NamedTuple):
    """Something that is said of a finding. A format shows a kind that it does not know as lines with their label."""

    kind: str
    lines: tuple[str, ...]
    label: str = ""


def facts_of(finding: Finding) -> list[Fact]:
    """All that is said of a finding beside its title, in order. What is added here is in every format."""
    facts = (
        Fact("subjects", finding.subjects),
        Fact("message", (finding.message,)),
        Fact("place", (format_place(finding),)),
        Fact("related", tuple(map(str, finding.related))),
        Fact("evidence", finding.evidence),
        Fact("fix", (finding.what_to_do,) if finding.what_to_do else (), "fix"),
    )
    return [fact for fact in facts if fact.lines]


def plain_facts(finding: Finding) -> list[str]:
    """The facts as lines without markup, but for the subjects, which programs get in a field of their own."""
    return [
        f"{fact.label}: {line}" if fact.label else line
        for fact in facts_of(finding)
        if fact.kind != "subjects"
        for line in fact.lines
    ]


def name_of(code: str) -> str:
    """The name of a rule; empty for one of a newer ddpcheck."""
    return RULES[code].name if code in RULES else ""


def title_of(finding: Finding) -> str:
    """The code, and the name of the rule."""
    return words(finding.code, name_of(finding.code))


def words(*parts: str) -> str:
    """Parts with spaces between, without those that are empty."""
    return " ".join(filter(None, parts))


def why_accepted(accepted: AcceptedFinding) -> str:
    """How a finding came not to count."""
    return "known" if accepted.by == "baseline" else "suppressed"


class Mark(NamedTuple):
    """How a status is shown: a sign, a word where the sign cannot be, a style of text, a word and a class of a page."""

    sign: str
    plain: str
    style: str
    word: str
    tone: str


STATUSES = {
    "passed": Mark("✓", "ok", "green", "passed", "ok"),
    "warned": Mark("~", "warn", "yellow", "warning", "warning"),
    "failed": Mark("✗", "FAIL", "red", "failed", "error"),
    "ignored": Mark("·", "ign", "dim", "ignored", "muted"),
    "skipped": Mark("-", "skip", "dim", "not checked", "warning"),
    "error": Mark("!", "STOP", "bold red", "stopped", "error"),
}
"""Of checks."""

VERDICTS = {
    "right": Mark("✓", "ok", "green", "all was compared, and nothing is at severity error", "ok"),
    "lossy": Mark("≈", "~", "green", "right up to the rounding of a communication hook", "ok"),
    "incomplete": Mark("-", "open", "yellow", "the same in all that was compared and not ignored", "warning"),
    "wrong": Mark("✗", "FAIL", "red", "trains to the end with a wrong result", "error"),
    "stops": Mark("!", "STOP", "bold red", "DDP raises, hangs or aborts", "error"),
    "skipped": Mark("-", "skip", "dim", "the options cannot make a difference", "muted"),
}
"""Of rows of a matrix; the words say what a verdict means."""


def tool_of(report: Report | Matrix) -> str:
    """The name and version of the tool that made a report."""
    return words(report.tool.get("name", "ddpcheck"), report.tool.get("version", ""))


_PHRASES: Mapping[str, Callable[[Any], str]] = {
    "world_size": lambda value: counted(value, "rank"),
    "backend": str,
    "device": str,
    "steps": lambda value: counted(value, "step"),
    "seed": lambda value: f"seed {value}",
    "timeout": lambda value: f"timeout {value:g} s" if isinstance(value, int | float) else f"timeout {value}",
}


def options_of(report: Report | Matrix) -> dict[str, Any]:
    """How a report was made, by the names of the options that have a value."""
    return {key: value for key, value in report.world.items() if key != "notes" and value is not None}


def options_in_words(report: Report | Matrix, only: Collection[str] = ()) -> list[str]:
    """How a report was made, the most important first; `only` names options."""
    given = {key: value for key, value in options_of(report).items() if not only or (key in only and value)}
    known = [phrase(given.pop(key)) for key, phrase in _PHRASES.items() if key in given]
    return known + [f"{key} {value}" for key, value in sorted(given.items())]


def versions_of(report: Report | Matrix) -> list[str]:
    """With which versions it was made."""
    return [f"{key} {value}" for key, value in sorted(report.environment.items()) if value is not None]


def notes_of(report: Report | Matrix) -> list[str]:
    """Sentences on how it was made."""
    notes = report.world.get("notes") or ()
    return [notes] if isinstance(notes, str) else list(map(str, notes))


def sorted_findings(report: Report) -> list[Finding]:
    """The worst first."""
    return sorted(report.findings, key=Finding.sort_key)


def severities_of(report: Report) -> str:
    """How many findings there are of each severity."""
    counts = Counter(finding.severity for finding in report.findings)
    return ", ".join(counted(counts[severity], severity.value) for severity in Severity if counts[severity])


def passed_in_words(report: Report) -> str:
    """What a clean report says."""
    return f"{counted(sum(check.status == 'passed' for check in report.checks), 'check')} passed, no findings"
