"""A matrix of DDP options as an HTML page: advice first, then a row for each combination.

This module is light: it never imports torch.
"""

from __future__ import annotations

from ddpcheck.findings.report import Report
from ddpcheck.findings.shortening import limited
from ddpcheck.findings.wording import counted
from ddpcheck.render import Medium
from ddpcheck.render.page.frame import Content, Markup, Sections, code, folded, mark, page, table, tag
from ddpcheck.render.page.report_page import about, kicker
from ddpcheck.report.matrix.matrix import Matrix, MatrixRow

_VERDICTS = {
    "right": ("tick", "ok"),
    "lossy": ("≈", "ok"),
    "incomplete": ("-", "warning"),
    "wrong": ("cross", "error"),
    "stops": ("!", "error"),
    "skipped": ("-", "muted"),
}
_MEANINGS = {
    "right": "all was compared, and nothing is at severity error",
    "lossy": "right up to what a communication hook rounds",
    "incomplete": "the same, as far as it was compared, or but for what is ignored",
    "wrong": "trains to the end with a wrong result",
    "stops": "DDP raises, hangs or aborts",
    "skipped": "the options cannot make a difference",
}


class MatrixHtmlRenderer:
    """A page for a browser, which needs nothing beside it."""

    def __init__(self, medium: Medium) -> None:
        self._medium = medium

    def render(self, matrix: Report | Matrix) -> str:
        """The page; names and messages are escaped."""
        assert isinstance(matrix, Matrix)
        shown = limited(matrix)
        sections: Sections = {
            **({"advice": ("Advice", _advice(shown))} if shown.advice else {}),
            **({"options": ("Combinations of options", _rows(shown))} if shown.rows else {}),
            "run": ("This run", about(shown)),
            "reading": ("How to read this page", _reading()),
        }
        return page(matrix, [kicker(shown, "matrix of DDP options"), _verdict(shown)], sections, self._medium)


def _verdict(matrix: Matrix) -> Markup:
    own = matrix.own
    if matrix.error is not None:
        class_, title, text = "error", "Stopped", matrix.error.message
    elif own is None:
        class_, title, text = "warning", "Nothing was run", ""
    else:
        class_, title = _VERDICTS[own.verdict][1], f"The recipe's own options: {own.verdict}"
        text = " ".join(filter(None, (own.code, own.reason)))
    said = [tag("p", text) if text else None, tag("p", f"{matrix.summary}.") if matrix.rows else None]
    return tag("div", tag("strong", title), said, class_=f"verdict {class_}", role="status")


def _advice(matrix: Matrix) -> Content:
    return tag("ul", [tag("li", tag("strong", one.kind), f": {one.message}") for one in matrix.advice])


def _rows(matrix: Matrix) -> Content:
    timed = any(row.step_time is not None for row in matrix.rows)
    rows = [[*_row(row), *([_step_time(row, matrix.noise or 0.0)] if timed else [])] for row in matrix.rows]
    base = next((row for row in matrix.rows if row.baseline), None)
    caption = counted(len(rows), "combination") + " of options"
    if timed and base is not None:
        caption += f"; step times are relative to {base.title}, with the 99 % interval of the median"
    return table(("", "options", "why", *(["step time"] if timed else [])), rows, caption, "stacks")


def _row(row: MatrixRow) -> list[Content]:
    drawn, class_ = _VERDICTS[row.verdict]
    own = tag("span", " the recipe's own", class_="badge note") if row.own else None
    told: list[Content] = [" ".join(filter(None, (row.code, row.reason)))]
    if row.verdict == "lossy" and row.error is not None:
        told.append(f"rounded by {row.error:.1e}")
    if row.what_to_do and not row.fine and row.verdict != "skipped":
        told.append(folded("What to change", tag("p", row.what_to_do)))
    others = [finding for finding in row.findings if finding.code != row.code]
    if others:
        items = [tag("li", f"{one.severity.value} {one.code}: {one.message}") for one in others]
        told.append(folded(counted(len(others), "more finding" if row.code else "finding"), tag("ul", items)))
    return [tag("span", mark(drawn), f" {row.verdict}", class_=f"status {class_}"), [code(row.title), own], told]


def _step_time(row: MatrixRow, noise: float) -> Content:
    time = row.step_time
    if time is None:
        return None
    if row.baseline:
        return tag("span", f"1 ({time.seconds * 1e3:.3g} ms)", class_="nobr")
    words = f"{time.ratio:.2f} ({time.low:.2f} to {time.high:.2f})" if time.differs(noise) else "no difference"
    return tag("span", words, class_="nobr")


def _reading() -> Content:
    items = [[tag("strong", word), f": {meaning}."] for word, meaning in _MEANINGS.items()]
    return tag("ul", [tag("li", one) for one in items])
