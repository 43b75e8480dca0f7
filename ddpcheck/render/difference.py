"""Render the difference of two reports as text or Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import RenderableType

from ddpcheck.findings.difference import ReportDifference
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import format_position, join_names, shorten_texts
from ddpcheck.render import Renderer
from ddpcheck.render.markdown import code_span, escaped
from ddpcheck.render.parts import title_of
from ddpcheck.render.text_parts import TextRenderer, facts_in_text, indented, labelled, styled

MOST_FINDINGS = 50


def _named_parts(difference: ReportDifference) -> Iterator[tuple[str, tuple[Finding, ...]]]:
    yield "new", difference.added
    yield "fixed", difference.fixed
    yield "remaining", difference.remaining
    yield "not found again, and not known to be fixed", difference.open


class DifferenceTerminalRenderer(TextRenderer):
    """Text renderer of a difference: new findings in detail, other findings as one line."""

    def render(self, difference: ReportDifference) -> str:
        difference = shorten_texts(difference)
        title = [styled(("ddpcheck diff", "bold"), f" of {difference.old} and {difference.new}")]
        parts = [self._part(name, findings) for name, findings in _named_parts(difference)]
        notes = [labelled("note: ", note) for note in difference.notes]
        return self.printed([title, *parts, notes], styled((difference.summary, "bold")))

    def _part(self, name: str, findings: tuple[Finding, ...]) -> Iterable[RenderableType]:
        if not findings:
            return
        yield styled((name, "bold"))
        for finding in findings[:MOST_FINDINGS]:
            yield indented(styled((_title(finding), "bold"), f"  {join_names(finding.subjects, most=8)}"))
            if name == "new":
                yield from facts_in_text(finding, 4, without=("subjects", "evidence"))
        if len(findings) > MOST_FINDINGS:
            yield indented(styled(f"and {len(findings) - MOST_FINDINGS} more"))


class DifferenceMarkdownRenderer(Renderer):
    """GitHub Markdown renderer of a difference: summary and lists of findings; escapes all text."""

    def render(self, difference: ReportDifference) -> str:
        lines = [f"## ddpcheck diff: {escaped(difference.summary)}"]
        for name, findings in _named_parts(difference):
            if findings:
                lines.append(f"\n### {name}\n")
            for finding in findings[:MOST_FINDINGS]:
                subjects = ", ".join(map(code_span, finding.subjects[:8]))
                place_text = f" ({escaped(format_position(finding))})" if name == "new" else ""
                lines.append(f"- {escaped(_title(finding))} {subjects}: {escaped(finding.message)}{place_text}")
            if len(findings) > MOST_FINDINGS:
                lines.append(f"- and {len(findings) - MOST_FINDINGS} more")
        lines += [f"\nNote: {escaped(note)}" for note in difference.notes]
        return self.medium.fitted("\n".join(lines) + "\n")


def _title(finding: Finding) -> str:
    return f"{title_of(finding)} ({finding.severity.value})"
