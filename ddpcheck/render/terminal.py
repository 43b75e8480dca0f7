"""The report as text for a person at a terminal, and for a log.

Names and messages are data: markup is off, and control characters in them are shown, not obeyed.

This module is light: it never imports torch.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ddpcheck.findings.report import Finding, ParityEntry, Report
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.severity import Severity
from ddpcheck.findings.shortening import limited
from ddpcheck.render import Medium
from ddpcheck.report.matrix.matrix import Matrix

MOST_FINDINGS = 50
MOST_SUBJECTS = 8
MOST_EVIDENCE = 16
MOST_DETAIL = 40
UNBROKEN = 10_000  # columns; a log keeps every sentence on one line

MARKS = {
    "passed": ("✓", "ok"),
    "warned": ("~", "warn"),
    "failed": ("✗", "FAIL"),
    "ignored": ("-", "ign"),
    "skipped": ("-", "skip"),
    "error": ("!", "STOP"),
}
MARK_STYLES = {
    "passed": "green",
    "warned": "yellow",
    "failed": "red",
    "ignored": "dim",
    "skipped": "dim",
    "error": "bold red",
}
SEVERITY_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}


class TerminalRenderer:
    """Text that a newcomer can read without the documentation: context, checks, findings, parity, notes, verdict."""

    def __init__(self, medium: Medium) -> None:
        self._medium = medium
        self._unicode = medium.shows("✓✗·")

    def render(self, report: Report) -> str:
        """The report as text."""
        report = limited(report)
        sections = (self._header, self._checks, self._findings, self._parity, self._notes, self._error)
        return self._printed([section(report) for section in sections], self._verdict(report))

    def _printed(self, sections: Iterable[Iterable[RenderableType]], verdict: RenderableType) -> str:
        """Sections with an empty line after each that is not empty, and the last line."""
        out = io.StringIO()
        console = Console(
            file=out,
            width=self._medium.width or UNBROKEN,
            force_terminal=self._medium.colour,
            color_system="standard" if self._medium.colour else None,
            no_color=not self._medium.colour,
            markup=False,
            emoji=False,
            highlight=False,
            legacy_windows=False,
            _environ={},  # the medium has been asked already
        )
        for section in sections:
            parts = list(section)
            for part in parts:
                console.print(part, soft_wrap=False)
            if parts:
                console.print()
        console.print(verdict)
        lines = [line.rstrip() for line in out.getvalue().splitlines()]
        text = "\n".join(lines) + "\n"
        return text if self._medium.shows(text) else text.encode(self._medium.encoding, "backslashreplace").decode()

    def _header(self, report: Report | Matrix, what: str = "report") -> Iterable[RenderableType]:
        tool = " ".join(filter(None, (report.tool.get("name", "ddpcheck"), report.tool.get("version", ""))))
        yield _text((tool, "bold"), f" {what} on ", (report.target, "bold"))
        world = {key: value for key, value in report.world.items() if key != "notes" and value is not None}
        phrases: dict[str, Callable[[object], str]] = {
            "world_size": lambda value: _count(value, "rank"),
            "backend": str,
            "device": str,
            "steps": lambda value: _count(value, "step"),
            "seed": lambda value: f"seed {value}",
            "timeout": lambda value: f"timeout {value:g} s" if isinstance(value, int | float) else f"timeout {value}",
        }
        facts = [phrase(world.pop(key)) for key, phrase in phrases.items() if key in world]
        facts += [f"{key} {value}" for key, value in sorted(world.items())]
        versions = [f"{key} {value}" for key, value in sorted(report.environment.items()) if value is not None]
        separator = " · " if self._unicode else ", "
        for line in (facts, versions):
            if line:
                yield _indented(_text((separator.join(line), "dim")))

    def _checks(self, report: Report) -> Iterable[RenderableType]:
        if not report.checks:
            return
        yield _text(("checks", "bold"))
        table = self._table()
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        table.add_column(justify="right", no_wrap=True)
        table.add_column(overflow="fold")
        for check in report.checks:
            mark = MARKS[check.status][0 if self._unicode else 1]
            seconds = "" if check.status == "skipped" else f"{check.seconds:.2f} s"
            table.add_row(
                _text((mark, MARK_STYLES[check.status])),
                _text(check.name),
                _text((seconds, "dim")),
                _text(check.detail),
            )
        yield _indented(table)

    def _findings(self, report: Report) -> Iterable[RenderableType]:
        findings = sorted(report.findings, key=Finding.sort_key)
        for number, finding in enumerate(findings[:MOST_FINDINGS]):
            if number:
                yield ""
            yield from self._finding(finding)
        if len(findings) > MOST_FINDINGS:
            yield ""
            yield _text(f"and {_count(len(findings) - MOST_FINDINGS, 'more finding')}: see the JSON report")

    def _finding(self, finding: Finding) -> Iterable[RenderableType]:
        rule = RULES.get(finding.code)
        severity, style = finding.severity, SEVERITY_STYLES[finding.severity]
        yield _text((finding.code, style), " ", (rule.name if rule else "", "bold"), "  ", (severity.value, style))
        if finding.subjects:
            yield _indented(_text((_listed(finding.subjects, MOST_SUBJECTS), "bold")))
        yield _indented(_text(finding.message))
        place = [] if finding.location is None else [f"at {finding.location}"]
        place.append("on every rank" if not finding.ranks else f"on {_numbers('rank', finding.ranks)}")
        if finding.steps:
            place.append(f"in {_numbers('step', finding.steps)}")
        yield _indented(_text((", ".join(place), "cyan")))
        for fact in finding.evidence[:MOST_EVIDENCE]:
            yield _indented(_text((fact, "dim")), 4)
        if len(finding.evidence) > MOST_EVIDENCE:
            yield _indented(_text((f"and {_count(len(finding.evidence) - MOST_EVIDENCE, 'more line')}", "dim")), 4)
        if finding.what_to_do:
            yield _indented(_labelled("fix: ", finding.what_to_do))

    def _parity(self, report: Report) -> Iterable[RenderableType]:
        worst: dict[str, ParityEntry] = {}
        compared: Counter[str] = Counter()
        for entry in report.parity:
            compared[entry.reference] += 1
            if entry.reference not in worst or _excess(entry) > _excess(worst[entry.reference]):
                worst[entry.reference] = entry
        if not worst:
            return
        yield _text(("gradients against each reference, worst parameter", "bold"))
        table = self._table()
        for heading in ("reference", "parameter", "step", "relative error", "allowed", "compared"):
            number = heading not in ("reference", "parameter")
            table.add_column(heading, justify="right" if number else "left", no_wrap=number, overflow="fold")
        table.show_header, table.header_style = True, "dim"
        for reference, entry in sorted(worst.items()):
            style = "red" if not entry.relative_error <= entry.tolerance else "green"
            table.add_row(
                _text(reference),
                _text(entry.parameter),
                str(entry.step),
                _text((f"{entry.relative_error:.1e}", style)),
                f"{entry.tolerance:.1e}",
                str(compared[reference]),
            )
        yield _indented(table)

    def _notes(self, report: Report | Matrix) -> Iterable[RenderableType]:
        notes = report.world.get("notes") or ()
        for note in [notes] if isinstance(notes, str) else notes:
            yield _labelled("note: ", str(note))

    def _error(self, report: Report | Matrix) -> Iterable[RenderableType]:
        if report.error is None or not report.error.detail.strip():
            return
        yield _text(("what stopped the checks", "bold"))
        lines = report.error.detail.rstrip().splitlines()
        if len(lines) > MOST_DETAIL:
            yield _indented(_text((f"{_count(len(lines) - MOST_DETAIL, 'line')} before these", "dim")))
        for line in lines[-MOST_DETAIL:]:
            yield _indented(_text(line)) if line.strip() else ""

    def _verdict(self, report: Report) -> RenderableType:
        counts = Counter(finding.severity for finding in report.findings)
        kinds = ", ".join(_count(counts[severity], severity.value) for severity in Severity if counts[severity])
        if report.error is not None:
            before = f" ({_count(len(report.findings), 'finding')} until then)" if report.findings else ""
            return _text(("stopped: ", "bold red"), f"{report.error.message}{before}")
        if report.findings:
            advice = " ".join(sorted({finding.code for finding in report.findings})[:1])
            worst = min(report.findings, key=lambda finding: finding.severity.rank).severity
            count = _count(len(report.findings), "finding")
            found = report.summary.replace(count, f"{count} ({kinds})", 1)
            return _text((found, SEVERITY_STYLES[worst]), f"; more on each: ddpcheck explain {advice}")
        if report.status != "clean":
            return _text((report.summary, "bold yellow"))
        passed = sum(check.status == "passed" for check in report.checks)
        return _text(("clean: ", "bold green"), f"{_count(passed, 'check')} passed, no findings")

    def _table(self) -> Table:
        return Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))


def _text(*parts: str | tuple[str, str]) -> Text:
    """Text without markup, from strings and (string, style) pairs, with control characters made visible."""
    text = Text(overflow="fold")
    for part in parts:
        content, style = (part, "") if isinstance(part, str) else part
        text.append("".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in content), style or None)
    return text


def _indented(content: RenderableType, columns: int = 2) -> Padding:
    return Padding(content, (0, 0, 0, columns), expand=False)


def _labelled(label: str, content: str) -> RenderableType:
    table = Table.grid(padding=0)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(_text((label, "bold")), _text(content))
    return table


def _count(number: object, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _listed(words: Sequence[str], most: int) -> str:
    shown = ", ".join(words[:most])
    return shown if len(words) <= most else f"{shown} and {len(words) - most} more"


def _numbers(noun: str, numbers: Iterable[int]) -> str:
    """`rank 1`, `ranks 0 and 2`, `ranks 0 to 7 and 9`: runs of three or more are folded."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words: list[str] = []
    for run in runs:
        words += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    plural = noun if len(words) == 1 and len(runs[0]) == 1 else f"{noun}s"
    return f"{plural} {', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else f"{plural} {words[0]}"


def _excess(entry: ParityEntry) -> float:
    """How far beyond its tolerance an entry is; what is not a number is beyond everything."""
    if entry.relative_error != entry.relative_error:
        return float("inf")
    return entry.relative_error / entry.tolerance if entry.tolerance > 0 else entry.relative_error
