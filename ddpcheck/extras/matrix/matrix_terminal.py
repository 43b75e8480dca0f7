"""Render the matrix of DDP options as text: a table of verdicts, and advice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import shorten

from rich.console import RenderableType

from ddpcheck.findings.rules import Severity
from ddpcheck.findings.wording import plural, shorten_texts
from ddpcheck.render.parts import VERDICTS, words
from ddpcheck.render.text_parts import TextRenderer, indented, labelled, styled
from ddpcheck.report.matrix.matrix import Matrix, MatrixRow
from ddpcheck.report.matrix.option_sets import DEFAULTS, DDPOptions

MOST_WORDS = 160  # characters of a reason in the table; the JSON has the full text


class MatrixTerminalRenderer(TextRenderer):
    """Text renderer: header, one row per option set, legend, advice, notes, verdict."""

    def render(self, matrix: Matrix) -> str:
        matrix = shorten_texts(matrix)
        sections = (self._title, self._rows, self._legend, self._advice, self.notes, self.error)
        return self.printed([section(matrix) for section in sections], self._verdict(matrix))

    def _title(self, matrix: Matrix) -> Iterable[RenderableType]:
        return self.header(matrix, "matrix of DDP options")

    def _rows(self, matrix: Matrix) -> Iterable[RenderableType]:
        if not matrix.rows:
            return
        timed = any(row.step_time is not None for row in matrix.rows)
        table = self.table()
        table.show_header, table.header_style = True, "dim"
        table.add_column("", no_wrap=True)
        table.add_column("options", overflow="fold", ratio=3 if self.medium.width else None)
        if timed:
            table.add_column("step time", no_wrap=True, min_width=19)  # fixed width: other columns do not move
        table.add_column("verdict", overflow="fold", ratio=4 if self.medium.width else None)
        for row in _grouped(matrix.rows):
            title = (row.title, "bold") if row.own else (row.title, "dim" if row.verdict == "skipped" else "")
            cells = [self.mark(VERDICTS[row.verdict]), styled(title, " (the recipe's own)" if row.own else "")]
            if timed:
                cells.append(styled(_step_time(row, matrix.noise or 0.0)))
            table.add_row(*cells, styled(_verdict(row)))
        yield indented(table)

    def _legend(self, matrix: Matrix) -> Iterable[RenderableType]:
        base = next((row for row in matrix.rows if row.baseline and row.step_time is not None), None)
        if base is None or base.step_time is None:
            return
        world = matrix.world
        environment = f"{world.get('backend')} on {world.get('device')}, {plural(world.get('world_size'), 'rank')}"
        seconds = base.step_time.seconds
        spelled = f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
        text = (
            f"step time: relative to {base.title} ({spelled}), median of pairs run in "
            f"turns on this machine, {environment}; '=' is no measurable difference"
        )
        if matrix.noise is not None:
            text += f" (the baseline differs from itself by up to {matrix.noise:.1%})"
        yield indented(styled((text, "dim")))

    def _advice(self, matrix: Matrix) -> Iterable[RenderableType]:
        for advice in matrix.advice:
            yield labelled(f"{'now' if advice.kind == 'own' else advice.kind}:".ljust(7), advice.message)

    def _verdict(self, matrix: Matrix) -> RenderableType:
        own_row = matrix.own
        if matrix.error is not None:
            return styled(("stopped: ", "bold red"), matrix.error.message)
        if own_row is None:
            return styled("nothing was run")
        style = f"bold {VERDICTS[own_row.verdict].style.removeprefix('bold ')}"
        return styled((f"{own_row.verdict}: ", style), f"the recipe's own options; {matrix.summary}")


def _grouped(rows: Sequence[MatrixRow]) -> list[MatrixRow]:
    """Return the rows, with skipped rows last and merged by reason."""
    skipped_rows = [row for row in rows if row.verdict == "skipped"]
    common = [
        name
        for name, value in (skipped_rows[0].arguments if skipped_rows else {}).items()
        if all(row.arguments.get(name) == value for row in skipped_rows)
    ]
    skipped: dict[str, list[str]] = {}
    for row in skipped_rows:
        options = DDPOptions({name: value for name, value in row.arguments.items() if name not in common}, row.hook)
        skipped.setdefault(row.reason, []).append(row.title if row.label or options == DEFAULTS else str(options))
    return [
        *(row for row in rows if row.verdict != "skipped"),
        *(MatrixRow({}, "skipped", label="; ".join(titles), reason=reason) for reason, titles in skipped.items()),
    ]


def _step_time(row: MatrixRow, noise: float) -> str:
    time = row.step_time
    if time is None:
        return ""
    if row.baseline:
        return "1"
    return f"{time.ratio:.2f} ({time.low:.2f} to {time.high:.2f})" if time.differs(noise) else "="


def _verdict(row: MatrixRow) -> str:
    reason = shorten(row.reason, MOST_WORDS, placeholder=" ...")
    if row.verdict == "lossy" and row.error is not None:
        text = f"right, rounded by {row.error:.1e}"
    elif row.verdict == "incomplete":
        text = f"nothing wrong otherwise: {reason}"
    elif row.fine:
        text = "right"
    elif row.verdict == "skipped":
        return f"skipped: {row.reason}"
    else:
        return f"{words(row.verdict, row.code)}: {reason}"
    warnings = [finding.code for finding in row.findings if finding.severity is Severity.WARNING]
    return f"{text}; warns of {', '.join(dict.fromkeys(warnings))}" if warnings else text
