"""Text sections shared by reports and matrices; control characters are escaped."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ddpcheck.findings.report import Finding, Report
from ddpcheck.findings.tracebacks import fold_traceback
from ddpcheck.findings.wording import plural, printable
from ddpcheck.render import Renderer
from ddpcheck.render.parts import Mark, facts_of, notes_of, options_in_words, tool_of, versions_of
from ddpcheck.report.matrix.matrix import Matrix

MOST_DETAIL = 40
MOST_EVIDENCE = 16
MOST_NAMES = 8
UNBROKEN = 10_000  # columns; a log keeps every sentence on one line

_STYLES = {"subjects": "bold", "place": "cyan", "evidence": "dim"}  # by kind of fact


class TextRenderer(Renderer):
    """Base class with the sections shared by reports and matrices."""

    def printed(self, sections: Iterable[Iterable[RenderableType]], verdict: RenderableType) -> str:
        """Return the sections, separated by blank lines, and the verdict."""
        out = io.StringIO()
        console = Console(
            file=out,
            width=self.medium.width or UNBROKEN,
            force_terminal=self.medium.colour,
            color_system="standard" if self.medium.colour else None,
            no_color=not self.medium.colour,
            markup=False,
            emoji=False,
            highlight=False,
            legacy_windows=False,
            _environ={},  # already read by `Medium.detect`
        )
        for section in () if self.medium.quiet else sections:
            parts = list(section)
            for part in parts:
                console.print(part, soft_wrap=False)
            if parts:
                console.print()
        console.print(verdict)
        lines = [line.rstrip() for line in out.getvalue().splitlines()]
        return self.medium.fitted("\n".join(lines) + "\n")

    def header(self, report: Report | Matrix, what: str = "report") -> Iterable[RenderableType]:
        yield styled((tool_of(report), "bold"), f" {what} on ", (report.target, "bold"))
        for line in (options_in_words(report), versions_of(report)):
            if line:
                yield indented(styled(((" · " if self.medium.shows("·") else ", ").join(line), "dim")))

    def notes(self, report: Report | Matrix) -> Iterable[RenderableType]:
        return [labelled("note: ", note) for note in notes_of(report)]

    def error(self, report: Report | Matrix) -> Iterable[RenderableType]:
        """Yield the traceback or output of the error that stopped the check."""
        if report.error is None or not report.error.detail.strip():
            return
        yield styled(("what stopped the checks", "bold"))
        detail = report.error.detail.rstrip()
        lines = (detail if self.medium.whole else fold_traceback(detail)).splitlines()
        most = len(lines) if self.medium.whole else MOST_DETAIL
        if len(lines) > most:
            yield indented(styled((f"{plural(len(lines) - most, 'line')} before these", "dim")))
        for line in lines[-most:]:
            yield indented(styled(line)) if line.strip() else ""

    def mark(self, mark: Mark) -> Text:
        """Return the sign of a status, or a word if signs cannot be shown."""
        return styled((mark.sign if self.medium.shows("✓≈✗·") else mark.plain, mark.style))

    def table(self) -> Table:
        return Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))


def styled(*parts: str | tuple[str, str]) -> Text:
    """Return text from strings and (string, style) pairs, with control characters escaped."""
    text = Text(overflow="fold")
    for part in parts:
        content, style = (part, "") if isinstance(part, str) else part
        text.append(printable(content), style or None)
    return text


def facts_in_text(
    finding: Finding, columns: int = 2, without: Collection[str] = (), *, whole: bool = False
) -> Iterator[RenderableType]:
    """Yield a finding's facts as lines, except fact kinds in `without`; truncate unless `whole`."""
    for fact in facts_of(finding):
        if fact.kind in without:
            continue
        lines, extra = fact.lines, 0
        if fact.kind == "subjects":
            lines = (", ".join(lines) if whole else join_first_names(lines),)
        elif fact.kind == "evidence":
            extra, hidden = 2, len(lines) - MOST_EVIDENCE
            if hidden > 0 and not whole:
                lines = (*lines[:MOST_EVIDENCE], f"and {plural(hidden, 'more line')}")
        for line in lines:
            styled_line = styled((line, _STYLES.get(fact.kind, "")))
            yield indented(labelled(f"{fact.label}: ", line) if fact.label else styled_line, columns + extra)


def join_first_names(names: Sequence[str]) -> str:
    """Join the first names, and say how many more names there are."""
    hidden = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {hidden} more" if hidden > 0 else "")


def break_name(name: str, columns: int) -> Text:
    """Break a dotted name into lines of `columns`, after dots if possible."""
    lines = [""]
    for part in printable(name).replace(".", ".\n").split("\n"):
        if lines[-1] and len(lines[-1]) + len(part) > columns:
            lines.append("")
        lines[-1] += part
    return Text("\n".join(lines), overflow="fold")


def indented(content: RenderableType, columns: int = 2) -> Padding:
    return Padding(content, (0, 0, 0, columns), expand=False)


def labelled(label: str, content: str) -> RenderableType:
    """Return `content` in a column next to a label."""
    table = Table.grid(padding=0)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(styled((label, "bold")), styled(content))
    return table
