"""Render a report as Markdown, for an issue or a job summary."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ddpcheck.findings.report import Finding, Report
from ddpcheck.findings.wording import plural, printable
from ddpcheck.render import Renderer, parts

MOST_FINDINGS = 100
_MOST_NAMES = 12
_PROSE = re.compile(r"(`[^`]*`)|([|*_`<>\[\]\\])")
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~&@-])")


class MarkdownRenderer(Renderer):
    """Markdown renderer: verdict, findings, then a table of checks."""

    def render(self, report: Report) -> str:
        """Return GitHub Markdown; names and messages are escaped."""
        return self.medium.fitted("\n".join(_lines(report)) + "\n")


def _lines(report: Report) -> Iterator[str]:
    yield f"## ddpcheck: {escaped(report.summary)}"
    ranks = "".join(f" on {size}" for size in parts.options_in_words(report, only=("world_size",)))
    yield f"\n{code_span(report.target)}{ranks}"
    if report.error is not None:
        yield f"\n**Stopped:** {escaped(report.error.message)}"
        if report.error.detail:
            yield f"\n{_block(report.error.detail)}"
    findings = parts.sorted_findings(report)
    for finding in findings[:MOST_FINDINGS]:
        yield from _finding(finding)
    if len(findings) > MOST_FINDINGS:
        yield f"\nAnd {plural(len(findings) - MOST_FINDINGS, 'more finding')}, in the JSON report."
    if report.accepted:
        yield "\n### found, and not counted\n"
    for accepted in report.accepted[:MOST_FINDINGS]:
        names = [accepted.finding.code, *([_names(accepted.finding.subjects)] if accepted.finding.subjects else [])]
        yield f"- {' '.join(names)}: {parts.why_accepted(accepted)}, {escaped(accepted.reason)}"
    if report.checks:
        yield "\n| check | | |\n|---|---|---|"
        for check in report.checks:
            sign = parts.STATUSES[check.status].sign
            yield f"| {escaped(check.name)} | {sign} {check.status} | {escaped(check.detail)} |"
    for note in parts.notes_of(report):
        yield f"\nNote: {escaped(note)}"
    yield f"\n{escaped(', '.join((parts.tool_of(report), *parts.versions_of(report))))}"


def _finding(finding: Finding) -> Iterator[str]:
    yield f"\n### {finding.severity.value}: {escaped(parts.title_of(finding))}"
    for fact in parts.facts_of(finding):
        if fact.kind == "subjects":
            num_hidden = len(fact.lines) - _MOST_NAMES
            yield f"\n{_names(fact.lines)}{f' and {num_hidden} more' if num_hidden > 0 else ''}"
        elif fact.kind == "evidence":
            yield "\n" + "\n".join(f"- {escaped(line)}" for line in fact.lines)
        else:
            label = f"**{fact.label}:** " if fact.label else ""
            yield from (f"\n{label}{escaped(line)}" for line in fact.lines)


def _names(names: Sequence[str]) -> str:
    return ", ".join(map(code_span, names[:_MOST_NAMES]))


def escaped(text: str) -> str:
    """Escape Markdown in a text."""
    return _SPECIAL.sub(r"\\\1", printable(text))


def prose(text: str) -> str:
    """Escape Markdown in a rule's text, except code in backticks."""
    return _PROSE.sub(lambda match: match[1] or f"\\{match[2]}", text)


def code_span(text: str) -> str:
    """Format a text as inline code, with enough backticks."""
    text = printable(text).replace("|", "\\|")
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _block(text: str) -> str:
    fence = "`" * max(3, max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}"
