"""Render a report or matrix as an HTML page with embedded JSON."""

from __future__ import annotations

import base64
import functools
import re
import unicodedata
import zlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ddpcheck.findings.report import Document, Report
from ddpcheck.findings.rules import sections_of
from ddpcheck.findings.wording import capitalized, format_ranks, format_steps, plural, printable, shorten, shorten_texts
from ddpcheck.render import Renderer, in_ascii, parts
from ddpcheck.render.page.charts import chart_view
from ddpcheck.render.page.sections import finding_view, module_tree, plots, timeline_view
from ddpcheck.report.matrix.matrix import Matrix

_PLAIN = 200_000  # characters; longer JSON is compressed
_MOST_DATA = 1 << 28
_DATA = re.compile(r'<script type="application/(json|zlib)" id="ddpcheck-data">([^<]*)</script>')


def embedded_data(report: Document) -> tuple[str, str]:
    """Return the report for embedding in a page: format ("json" or "zlib"), and text."""
    text = report.to_json(indent=None)
    if len(text) <= _PLAIN:
        return "json", in_ascii(text, besides="<>&")
    return "zlib", base64.b64encode(zlib.compress(text.encode("utf-8", "surrogatepass"), 9)).decode()


def data_in(page: str) -> str | None:
    """Return the JSON in a report page (`ValueError` if damaged); None for other text."""
    if not page.lstrip().lower().startswith("<!doctype html"):
        return None
    match = _DATA.search(page)
    if match is None or match[1] == "json":
        return match[2] if match else None
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(base64.b64decode(match[2], validate=True), _MOST_DATA)
    except (zlib.error, ValueError) as error:
        raise ValueError(f"the data in the page is damaged ({error})") from None
    if not reader.eof:
        raise ValueError("the data in the page is not whole")
    return data.decode("utf-8", "surrogatepass")


MOST_FINDINGS = 100

_TITLES = {
    "findings": "Findings",
    "accepted": "Found, and not counted",
    "curves": "The ranks against a single process",
    "collectives": "Collectives of the ranks",
    "checks": "What was compared, and what was not",
    "gradients": "Gradients against their tolerance",
    "modules": "Modules",
    "advice": "Advice",
    "options": "Combinations of options",
    "run": "This run",
    "reading": "How to read this page",
}
"""Titles of sections, in order; an empty section is left out. Each section has the template of its name."""


class HtmlRenderer(Renderer):
    """Renderer of a self-contained HTML page; names and messages are escaped."""

    def render(self, report: Report | Matrix) -> str:
        shown = shorten_texts(report)
        if isinstance(shown, Matrix):
            kind_name, verdict = "matrix of DDP options", _verdict_of_matrix(shown)
            sections = {"findings": (), "advice": shown.advice, "options": shown.rows, "run": True, "reading": True}
        else:
            kind_name, verdict, sections = "report", _verdict(shown), _sections(shown)
        kind, data = embedded_data(report)
        kicker = parts.options_in_words(shown, only=("world_size", "backend", "device", "steps"))
        template = _templates().get_template("page.html")
        text = template.render(
            title=shorten(report.target, 80),
            what=kind_name,
            report=shown,
            verdict=verdict,
            titles={name: _TITLES[name] for name in _TITLES if sections.get(name)},
            kicker=[*kicker, *(version for version in parts.versions_of(shown) if version.startswith("torch "))],
            data_kind=kind,
            data=Markup(data),
            **sections,
        )
        shows = self.medium.shows(text)
        return f"{text if shows else text.encode('ascii', 'xmlcharrefreplace').decode('ascii')}\n"


def _sections(report: Report) -> dict[str, Any]:
    findings = parts.sorted_findings(report)[:MOST_FINDINGS]
    return {
        "findings": [finding_view(finding, report) for finding in findings],
        "accepted": report.accepted[:MOST_FINDINGS],
        "curves": [chart_view(curve) for curve in report.curves],
        "collectives": [timeline_view(timeline) for timeline in report.timelines],
        "checks": report.checks,
        "gradients": plots(report.parity),
        "modules": module_tree(report),
        "run": True,
        "reading": True,
    }


def _verdict(report: Report) -> tuple[str, str, list[str]]:
    """Return the CSS class, title and text lines of the verdict."""
    findings, kinds, lines = parts.sorted_findings(report), parts.severities_of(report), []
    if report.error is not None:
        class_, title = "error", ": ".join(filter(None, ("Hang" if report.status == "hang" else "Stopped", kinds)))
        lines = [report.error.message]
    elif findings:
        name = parts.name_of(findings[0].code) if len(findings) == 1 else ""
        class_, title = findings[0].severity.value, ": ".join(filter(None, (kinds, name)))
    elif report.status == "clean":
        class_, title, lines = "ok", "Clean", [f"{parts.passed_in_words(report)}."]
    elif report.not_made:
        class_, title = "warning", "No findings, and not all was checked"
    else:
        class_, title = "ok", "No findings that count"
    return class_, title, lines


def _verdict_of_matrix(matrix: Matrix) -> tuple[str, str, list[str]]:
    own_row = matrix.own
    if matrix.error is not None:
        class_, title, text = "error", "Stopped", matrix.error.message
    elif own_row is None:
        class_, title, text = "warning", "Nothing was run", ""
    else:
        class_, title = parts.VERDICTS[own_row.verdict].tone, f"The recipe's own options: {own_row.verdict}"
        text = parts.words(own_row.code, own_row.reason)
    return class_, title, [line for line in (text, f"{matrix.summary}." if matrix.rows else "") if line]


@functools.cache
def _templates() -> Environment:
    """Return the template environment, which escapes HTML and invisible characters."""
    folder = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else visible(str(value)),
    )
    environment.filters.update(
        counted=plural, fitted=fitted, ranks=format_ranks, sentence=capitalized, short=shorten, steps=format_steps
    )
    environment.globals.update(say=parts, sections_of=sections_of, css=Markup((folder / "page.css").read_text("utf-8")))
    environment.globals["ui"] = environment.get_template("parts.html").module
    return environment


def visible(text: str) -> str:
    """Escape invisible and control characters as `repr` does.

    Emoji are replaced by names ("[beach with umbrella]"): fonts without emoji show the same box for every emoji.
    """
    plain = printable(text, "\n").replace("\ufe0f", "")  # variation selector after an emoji
    emoji = {c for c in plain if ord(c) >= 0x1F000 and unicodedata.category(c) == "So"}
    return "".join(f"[{unicodedata.name(c, 'emoji').lower()}]" if c in emoji else c for c in plain)


def fitted(text: str, most: int) -> str:
    """Return `text`, cut in the middle if longer than `most`."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-(most // 2) :]}"
