"""Facts and words of a report that all output formats share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from ddpcheck.findings.report import AcceptedFinding, Finding, Report, Severity
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import format_position, plural
from ddpcheck.report.matrix.matrix import Matrix


class Fact(NamedTuple):
    """Part of a finding, e.g. its message; renderers show unknown kinds as labelled lines."""

    kind: str
    lines: tuple[str, ...]
    label: str = ""


def facts_of(finding: Finding) -> list[Fact]:
    """Return the facts that every renderer shows below a finding's title, in order."""
    facts = (
        Fact("subjects", finding.subjects),
        Fact("message", (finding.message,)),
        Fact("place", (format_position(finding),)),
        Fact("related", tuple(map(str, finding.related))),
        Fact("evidence", finding.evidence),
        Fact("fix", (finding.what_to_do,) if finding.what_to_do else (), "fix"),
    )
    return [fact for fact in facts if fact.lines]


def plain_facts(finding: Finding) -> list[str]:
    """Return the facts except subjects, as lines without markup."""
    return [
        f"{fact.label}: {line}" if fact.label else line
        for fact in facts_of(finding)
        if fact.kind != "subjects"
        for line in fact.lines
    ]


def name_of(code: str) -> str:
    """Return the name of a rule, "" for a rule of a newer ddpcheck."""
    return RULES[code].name if code in RULES else ""


def title_of(finding: Finding) -> str:
    """Return the code and the rule name."""
    return words(finding.code, name_of(finding.code))


def words(*parts: str) -> str:
    """Join the parts that are not empty with spaces."""
    return " ".join(filter(None, parts))


def why_accepted(accepted: AcceptedFinding) -> str:
    """Return why a finding is not counted: "known" or "suppressed"."""
    return "known" if accepted.by == "baseline" else "suppressed"


class Mark(NamedTuple):
    """Display of a status: sign, ASCII word, text style, page word, CSS class."""

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
"""Marks of check statuses."""

VERDICTS = {
    "right": Mark("✓", "ok", "green", "all was compared, and nothing is at severity error", "ok"),
    "lossy": Mark("≈", "~", "green", "right up to the rounding of a communication hook", "ok"),
    "incomplete": Mark("-", "open", "yellow", "the same in all that was compared and not ignored", "warning"),
    "wrong": Mark("✗", "FAIL", "red", "trains to the end with a wrong result", "error"),
    "stops": Mark("!", "STOP", "bold red", "DDP raises, hangs or aborts", "error"),
    "skipped": Mark("-", "skip", "dim", "the options cannot make a difference", "muted"),
}
"""Marks of matrix verdicts; the words explain the verdict."""


def tool_of(report: Report | Matrix) -> str:
    """Return the name and version of the tool that made a report."""
    return words(report.tool.get("name", "ddpcheck"), report.tool.get("version", ""))


_PHRASES: Mapping[str, Callable[[Any], str]] = {
    "world_size": lambda value: plural(value, "rank"),
    "backend": str,
    "device": str,
    "steps": lambda value: plural(value, "step"),
    "seed": lambda value: f"seed {value}",
    "timeout": lambda value: f"timeout {value:g} s" if isinstance(value, int | float) else f"timeout {value}",
}


def options_of(report: Report | Matrix) -> dict[str, Any]:
    """Return the options of a report that have a value, by name."""
    return {key: value for key, value in report.world.items() if key != "notes" and value is not None}


def options_in_words(report: Report | Matrix, only: Collection[str] = ()) -> list[str]:
    """Format the options of a report, most important first; `only` selects options."""
    options = {key: value for key, value in options_of(report).items() if not only or (key in only and value)}
    phrases = [phrase(options.pop(key)) for key, phrase in _PHRASES.items() if key in options]
    return phrases + [f"{key} {value}" for key, value in sorted(options.items())]


def versions_of(report: Report | Matrix) -> list[str]:
    """Format the versions in the environment of a report."""
    return [f"{key} {value}" for key, value in sorted(report.environment.items()) if value is not None]


def notes_of(report: Report | Matrix) -> list[str]:
    """Return the notes on how a report was made."""
    notes = report.world.get("notes") or ()
    return [notes] if isinstance(notes, str) else list(map(str, notes))


def sorted_findings(report: Report) -> list[Finding]:
    """Return the findings, worst first."""
    return sorted(report.findings, key=Finding.sort_key)


def severities_of(report: Report) -> str:
    """Format the number of findings of each severity."""
    counts = Counter(finding.severity for finding in report.findings)
    return ", ".join(plural(counts[severity], severity.value) for severity in Severity if counts[severity])


def passed_in_words(report: Report) -> str:
    """Format the summary of a clean report."""
    return f"{plural(sum(check.status == 'passed' for check in report.checks), 'check')} passed, no findings"
