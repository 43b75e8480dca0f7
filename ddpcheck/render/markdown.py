"""A report as Markdown: for an issue, or for the summary of a job.

This module is light: it never imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddpcheck.findings.report import Finding, Report
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import counted, format_place
from ddpcheck.render import Medium
from ddpcheck.report.matrix.matrix import Matrix

MOST_FINDINGS = 100
_MARKS = {"passed": "✓", "warned": "~", "failed": "✗", "ignored": "·", "skipped": "-", "error": "!"}
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~&@-])")


class MarkdownRenderer:
    """The verdict first, then the findings, then the checks in a table."""

    def __init__(self, medium: Medium) -> None:
        self._medium = medium

    def render(self, report: Report | Matrix) -> str:
        """The Markdown, in GitHub's flavour; names and messages are escaped."""
        assert isinstance(report, Report)
        text = "\n".join(_lines(report)) + "\n"
        encoding = self._medium.encoding
        return text if self._medium.shows(text) else text.encode(encoding, "backslashreplace").decode(encoding)


def _lines(report: Report) -> Iterator[str]:
    yield f"## ddpcheck: {escaped(report.summary)}"
    size = report.world.get("world_size")
    ranks = f" on {counted(size, 'rank')}" if size else ""
    yield f"\n{code_span(report.target)}{ranks}"
    if report.error is not None:
        yield f"\n**Stopped:** {escaped(report.error.message)}"
        if report.error.detail:
            yield f"\n{_block(report.error.detail)}"
    findings = sorted(report.findings, key=Finding.sort_key)
    for finding in findings[:MOST_FINDINGS]:
        yield from _finding(finding)
    if len(findings) > MOST_FINDINGS:
        yield f"\nAnd {counted(len(findings) - MOST_FINDINGS, 'more finding')}, in the JSON report."
    if report.accepted:
        yield "\n### found, and not counted\n"
    for one in report.accepted[:MOST_FINDINGS]:
        how = "known" if one.by == "baseline" else "suppressed"
        subjects = f" {', '.join(map(code_span, one.finding.subjects[:12]))}" if one.finding.subjects else ""
        yield f"- {one.finding.code}{subjects}: {how}, {escaped(one.reason)}"
    if report.checks:
        yield "\n| check | | |\n|---|---|---|"
        for check in report.checks:
            yield f"| {escaped(check.name)} | {_MARKS[check.status]} {check.status} | {escaped(check.detail)} |"
    notes = report.world.get("notes") or ()
    for note in [notes] if isinstance(notes, str) else notes:
        yield f"\nNote: {escaped(note)}"
    versions = [f"{key} {value}" for key, value in sorted(report.environment.items()) if value is not None]
    tool = " ".join(filter(None, (report.tool.get("name", "ddpcheck"), report.tool.get("version", ""))))
    yield f"\n{escaped(', '.join((tool, *versions)))}"


def _finding(finding: Finding) -> Iterator[str]:
    rule = RULES.get(finding.code)
    yield f"\n### {finding.severity.value}: {finding.code} {escaped(rule.name if rule else '')}\n"
    if finding.subjects:
        shown = ", ".join(map(code_span, finding.subjects[:12]))
        more = len(finding.subjects) - 12
        yield f"{shown}{f' and {more} more' if more > 0 else ''}\n"
    yield escaped(finding.message)
    yield f"\n{escaped(format_place(finding))}"
    if finding.evidence:
        yield "\n" + "\n".join(f"- {escaped(fact)}" for fact in finding.evidence)
    if finding.what_to_do:
        yield f"\n**What to do:** {escaped(finding.what_to_do)}"


def escaped(text: str) -> str:
    """A text without meaning in Markdown."""
    printable = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return _SPECIAL.sub(r"\\\1", printable).replace("\n", "<br>")


def code_span(text: str) -> str:
    """A text as code, between as many backticks as it needs."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text).replace("|", "\\|")
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _block(text: str) -> str:
    fence = "`" * max(3, max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}"
