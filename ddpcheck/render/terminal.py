"""Render a report as text, for a terminal or a log."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType

from ddpcheck.findings.report import Finding, Report, Severity
from ddpcheck.findings.wording import group_by, plural, shorten_texts
from ddpcheck.render import parts
from ddpcheck.render.text_parts import (
    UNBROKEN,
    TextRenderer,
    break_name,
    facts_in_text,
    indented,
    join_first_names,
    labelled,
    styled,
)

MOST_FINDINGS = 50
_MOST_EXPLAINED = 4  # codes in the last line
_OTHER_COLUMNS = 59  # width of the gradient table without the parameter column

SEVERITY_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}


class TerminalRenderer(TextRenderer):
    """Text renderer: header, checks, findings, accepted findings, parity, notes, verdict."""

    def render(self, report: Report) -> str:
        report = shorten_texts(report)
        sections = (self.header, self._checks, self._findings, self._accepted, self._parity, self.notes, self.error)
        return self.printed([section(report) for section in sections], self._verdict(report))

    def _checks(self, report: Report) -> Iterable[RenderableType]:
        if not report.checks:
            return
        yield styled(("checks", "bold"))
        table = self.table()
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        table.add_column(justify="right", no_wrap=True)
        table.add_column(overflow="fold")
        timed = any(check.seconds for check in report.checks)  # checks of a script are not timed
        for check in report.checks:
            seconds = f"{check.seconds:.2f} s" if timed and check.status != "skipped" else ""
            mark = self.mark(parts.STATUSES[check.status])
            table.add_row(mark, styled(check.name), styled((seconds, "dim")), styled(check.detail))
        yield indented(table)

    def _findings(self, report: Report) -> Iterable[RenderableType]:
        findings = parts.sorted_findings(report)
        for number, finding in enumerate(findings[:MOST_FINDINGS]):
            if number:
                yield ""
            yield from self._finding(finding)
        if len(findings) > MOST_FINDINGS:
            yield ""
            yield styled(f"and {plural(len(findings) - MOST_FINDINGS, 'more finding')}: see the JSON report")

    def _finding(self, finding: Finding) -> Iterable[RenderableType]:
        style, name = SEVERITY_STYLES[finding.severity], parts.name_of(finding.code)
        yield styled((finding.code, style), " ", (name, "bold"), "  ", (finding.severity.value, style))
        yield from facts_in_text(finding, whole=self.medium.whole)

    def _accepted(self, report: Report) -> Iterable[RenderableType]:
        if not report.accepted:
            return
        yield styled(("found, and not counted", "bold"))
        for item in report.accepted[:MOST_FINDINGS]:
            subjects = f"  {join_first_names(item.finding.subjects)}" if item.finding.subjects else ""
            yield indented(styled((parts.title_of(item.finding), "dim"), f"  {item.finding.severity.value}{subjects}"))
            yield indented(labelled(f"{parts.why_accepted(item)}: ", item.reason), 4)
        if len(report.accepted) > MOST_FINDINGS:
            yield indented(styled(f"and {len(report.accepted) - MOST_FINDINGS} more: see the JSON report"))

    def _parity(self, report: Report) -> Iterable[RenderableType]:
        if not report.parity:
            return
        yield styled(("gradients against each reference, worst parameter", "bold"))
        table = self.table()
        for heading in ("reference", "parameter", "step", "relative error", "allowed", "compared"):
            is_number = heading not in ("reference", "parameter")
            table.add_column(heading, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
        table.show_header, table.header_style = True, "dim"
        name_width = max((self.medium.width or UNBROKEN) - _OTHER_COLUMNS, 16)
        for reference, entries in sorted(group_by(report.parity, lambda entry: entry.reference).items()):
            worst = max(entries, key=lambda entry: entry.excess)
            error_text = "inf" if worst.relative_error >= 1e30 else f"{worst.relative_error:.1e}"
            error = styled((error_text, "red" if worst.is_beyond else "green"))
            allowed = f"{worst.tolerance:.1e}" if worst.tells else "any"
            name = break_name(worst.parameter, name_width)
            table.add_row(styled(reference), name, str(worst.step), error, allowed, str(len(entries)))
        yield indented(table)

    def _verdict(self, report: Report) -> RenderableType:
        if report.error is not None:
            suffix = f" ({plural(len(report.findings), 'finding')} until then)" if report.findings else ""
            return styled(("stopped: ", "bold red"), f"{report.error.message}{suffix}")
        if report.findings:
            findings = parts.sorted_findings(report)
            codes = [*dict.fromkeys(finding.code for finding in findings)]
            advice = " ".join([*codes[:_MOST_EXPLAINED], *(["..."] if len(codes) > _MOST_EXPLAINED else [])])
            count = plural(len(findings), "finding")
            text = report.summary.replace(count, f"{count} ({parts.severities_of(report)})", 1)
            return styled((text, SEVERITY_STYLES[findings[0].severity]), f"; more on each: ddpcheck explain {advice}")
        if report.status != "clean":
            return styled((report.summary, "bold yellow"))
        return styled(("clean: ", "bold green"), parts.passed_in_words(report))
