"""The report as text for a person at a terminal, and for a log.

Names and messages are data: markup is off, and control characters in them are shown, not obeyed.

This module is light: it never imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import RenderableType

from ddpcheck.findings.report import Finding, ParityEntry, Report
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.severity import Severity
from ddpcheck.findings.shortening import limited
from ddpcheck.findings.wording import counted, format_place
from ddpcheck.render.text_parts import UNBROKEN, TextRenderer, broken, indented, labelled, styled

MOST_FINDINGS = 50
MOST_SUBJECTS = 8
MOST_EVIDENCE = 16
_MOST_EXPLAINED = 4  # codes in the last line

_OTHER_COLUMNS = 59  # of the table of gradients: all but the parameter's

MARKS = {
    "passed": ("✓", "ok", "green"),
    "warned": ("~", "warn", "yellow"),
    "failed": ("✗", "FAIL", "red"),
    "ignored": ("-", "ign", "dim"),
    "skipped": ("-", "skip", "dim"),
    "error": ("!", "STOP", "bold red"),
}
SEVERITY_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}


class TerminalRenderer(TextRenderer):
    """Text that a newcomer can read without the documentation: context, checks, findings, parity, notes, verdict."""

    def render(self, report: Report) -> str:
        """The report as text."""
        report = limited(report)
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
        timed = any(check.seconds for check in report.checks)  # those of a script are not
        for check in report.checks:
            mark, plain, style = MARKS[check.status]
            seconds = f"{check.seconds:.2f} s" if timed and check.status != "skipped" else ""
            table.add_row(
                styled((mark if self.unicode else plain, style)),
                styled(check.name),
                styled((seconds, "dim")),
                styled(check.detail),
            )
        yield indented(table)

    def _findings(self, report: Report) -> Iterable[RenderableType]:
        findings = sorted(report.findings, key=Finding.sort_key)
        for number, finding in enumerate(findings[:MOST_FINDINGS]):
            if number:
                yield ""
            yield from self._finding(finding)
        if len(findings) > MOST_FINDINGS:
            yield ""
            yield styled(f"and {counted(len(findings) - MOST_FINDINGS, 'more finding')}: see the JSON report")

    def _finding(self, finding: Finding) -> Iterable[RenderableType]:
        rule = RULES.get(finding.code)
        severity, style = finding.severity, SEVERITY_STYLES[finding.severity]
        yield styled((finding.code, style), " ", (rule.name if rule else "", "bold"), "  ", (severity.value, style))
        if finding.subjects:
            yield indented(styled((_listed(finding.subjects, MOST_SUBJECTS), "bold")))
        yield indented(styled(finding.message))
        yield indented(styled((format_place(finding), "cyan")))
        for fact in finding.evidence[:MOST_EVIDENCE]:
            yield indented(styled((fact, "dim")), 4)
        if len(finding.evidence) > MOST_EVIDENCE:
            yield indented(styled((f"and {counted(len(finding.evidence) - MOST_EVIDENCE, 'more line')}", "dim")), 4)
        if finding.what_to_do:
            yield indented(labelled("fix: ", finding.what_to_do))

    def _accepted(self, report: Report) -> Iterable[RenderableType]:
        """What was found and does not count, each with the reason."""
        if not report.accepted:
            return
        yield styled(("found, and not counted", "bold"))
        for one in report.accepted[:MOST_FINDINGS]:
            rule = RULES.get(one.finding.code)
            name = f" {rule.name}" if rule else ""
            subjects = f"  {_listed(one.finding.subjects, MOST_SUBJECTS)}" if one.finding.subjects else ""
            yield indented(styled((one.finding.code + name, "dim"), f"  {one.finding.severity.value}{subjects}"))
            why = "known: " if one.by == "baseline" else "suppressed: "
            yield indented(labelled(why, one.reason), 4)
        if len(report.accepted) > MOST_FINDINGS:
            yield indented(styled(f"and {len(report.accepted) - MOST_FINDINGS} more: see the JSON report"))

    def _parity(self, report: Report) -> Iterable[RenderableType]:
        worst: dict[str, ParityEntry] = {}
        compared: Counter[str] = Counter()
        for entry in report.parity:
            compared[entry.reference] += 1
            if entry.reference not in worst or entry.excess > worst[entry.reference].excess:
                worst[entry.reference] = entry
        if not worst:
            return
        yield styled(("gradients against each reference, worst parameter", "bold"))
        table = self.table()
        for heading in ("reference", "parameter", "step", "relative error", "allowed", "compared"):
            number = heading not in ("reference", "parameter")
            table.add_column(heading, justify="right" if number else "left", no_wrap=number, overflow="fold")
        table.show_header, table.header_style = True, "dim"
        room = max((self.medium.width or UNBROKEN) - _OTHER_COLUMNS, 16)
        for reference, entry in sorted(worst.items()):
            style = "red" if entry.is_beyond else "green"
            table.add_row(
                styled(reference),
                styled(broken(entry.parameter, room)),
                str(entry.step),
                styled((f"{entry.relative_error:.1e}", style)),
                f"{entry.tolerance:.1e}",
                str(compared[reference]),
            )
        yield indented(table)

    def _verdict(self, report: Report) -> RenderableType:
        counts = Counter(finding.severity for finding in report.findings)
        kinds = ", ".join(counted(counts[severity], severity.value) for severity in Severity if counts[severity])
        if report.error is not None:
            before = f" ({counted(len(report.findings), 'finding')} until then)" if report.findings else ""
            return styled(("stopped: ", "bold red"), f"{report.error.message}{before}")
        if report.findings:
            codes = [*dict.fromkeys(finding.code for finding in sorted(report.findings, key=Finding.sort_key))]
            advice = " ".join([*codes[:_MOST_EXPLAINED], *(["..."] if len(codes) > _MOST_EXPLAINED else [])])
            worst = min(report.findings, key=lambda finding: finding.severity.rank).severity
            count = counted(len(report.findings), "finding")
            found = report.summary.replace(count, f"{count} ({kinds})", 1)
            return styled((found, SEVERITY_STYLES[worst]), f"; more on each: ddpcheck explain {advice}")
        if report.status != "clean":
            return styled((report.summary, "bold yellow"))
        passed = sum(check.status == "passed" for check in report.checks)
        return styled(("clean: ", "bold green"), f"{counted(passed, 'check')} passed, no findings")


def _listed(words: Sequence[str], most: int) -> str:
    shown = ", ".join(words[:most])
    return shown if len(words) <= most else f"{shown} and {len(words) - most} more"
