"""Renderers: one contract, `Renderer.render(report) -> str`, and the registry of formats.

A renderer reads a `Report` and nothing else, and recomputes nothing. A new format is a module with a renderer and
one entry in `FORMATS`.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, TextIO

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.report import Document, Report
from ddpcheck.findings.wording import suggestion


@dataclass(frozen=True, slots=True)
class Medium:
    """The abilities of the place where text goes. The defaults are those of a file or a log."""

    width: int | None = None  # columns; `None` where lines need not be broken
    colour: bool = False  # whether it understands colours
    encoding: str = "utf-8"  # what its characters are encoded in
    interactive: bool = False  # whether a person sits in front of it
    whole: bool = False  # whether all names, evidence and frames of tracebacks are shown
    quiet: bool = False  # whether the verdict alone is shown

    @classmethod
    def of(cls, stream: TextIO | None, environ: Mapping[str, str] | None = None) -> Medium:
        """Ask a stream (None where it is closed), and the variables NO_COLOR, FORCE_COLOR, TERM and COLUMNS."""
        environ = os.environ if environ is None else environ
        terminal = stream is not None and stream.isatty()
        width = environ.get("COLUMNS", "")
        columns = max(int(width), 40) if width.isdecimal() and len(width) < 6 and int(width) else None
        if columns is None and terminal:
            columns = max(shutil.get_terminal_size().columns, 40)
        colour = (terminal and environ.get("TERM") != "dumb") or bool(environ.get("FORCE_COLOR"))
        return cls(
            width=columns,
            colour=colour and not environ.get("NO_COLOR"),
            encoding=getattr(stream, "encoding", None) or "ascii",
            interactive=terminal,
        )

    def shows(self, text: str) -> bool:
        """Whether `text` can be encoded."""
        try:
            text.encode(self.encoding)
        except (UnicodeEncodeError, LookupError):
            return False
        return True

    def fitted(self, text: str) -> str:
        """`text`, with what cannot be encoded as escapes of Python."""
        return text if self.shows(text) else text.encode(self.encoding, "backslashreplace").decode(self.encoding)


class Renderer:
    """Base of what turns a report, a matrix or a difference, whichever it is made for, into text for a medium."""

    def __init__(self, medium: Medium) -> None:
        self.medium = medium

    def render(self, report: Any) -> str:
        """The whole output, with a newline at its end."""
        raise NotImplementedError


class JsonRenderer(Renderer):
    """Writes what `Report.from_json` or `Matrix.from_json` reads, or a difference."""

    def render(self, report: Document) -> str:
        """The report as JSON with sorted keys; characters that the medium cannot show are escaped as JSON does."""
        text = report.to_json()
        return (text if self.medium.shows(text) else in_ascii(text)) + "\n"


def in_ascii(text: str, besides: str = "") -> str:
    """JSON without any but ASCII characters, and without those `besides`, which may stand in its strings."""
    escaped = {character: f"\\u{ord(character):04x}" for character in besides}
    return "".join(escaped.get(c) or (c if c < "\x7f" else json.dumps(c)[1:-1]) for c in text)


_HTML = "ddpcheck.render.page.page:HtmlRenderer"
_JSON = "ddpcheck.render:JsonRenderer"
FORMATS: Mapping[str, str] = {
    "text": "ddpcheck.render.terminal:TerminalRenderer",
    "json": _JSON,
    "markdown": "ddpcheck.render.markdown:MarkdownRenderer",
    "sarif": "ddpcheck.render.sarif:SarifRenderer",
    "junit": "ddpcheck.render.junit:JunitRenderer",
    "html": _HTML,
    "github": "ddpcheck.render.github:GithubRenderer",
}
"""The formats of a `Report`: the class that renders each, as `module:name` so that it is loaded on use."""

MATRIX_FORMATS = {"json": _JSON, "html": _HTML, "text": "ddpcheck.render.matrix_terminal:MatrixTerminalRenderer"}
"""The formats of a `Matrix`."""

DIFFERENCE_FORMATS = {
    "text": "ddpcheck.render.difference:DifferenceTerminalRenderer",
    "json": _JSON,
    "markdown": "ddpcheck.render.difference:DifferenceMarkdownRenderer",
}
"""The formats of a `ReportDifference`."""

_EXTENSIONS = {
    **{".txt": "text", ".log": "text", ".json": "json", ".md": "markdown", ".sarif": "sarif", ".xml": "junit"},
    **{".html": "html", ".htm": "html"},
}


def format_for(
    name: str | None, *, path: str | None, formats: Mapping[str, str] = FORMATS, default: str | None = None
) -> str:
    """The name of a format, or of the one that the extension of `path` stands for, or `default`, or that of text.

    Args:
        name: Of the format.
        path: Where the output goes.
        formats: To choose from; those of a report where absent.
        default: Name of the format where neither says.

    Raises:
        UsageError: There is no such format, or the extension stands for none.
    """
    if name is None and path is not None:
        known = {extension: form for extension, form in _EXTENSIONS.items() if form in formats}
        name = known.get(PurePath(path).suffix.lower())
        if name is None and default is None:
            raise UsageError(
                f"cannot determine the format from the name {path!r}: use one of {', '.join(known)}, or name a format"
            )
    chosen = name or default or "text"
    if chosen not in formats:
        whose = "" if name else ", which the environment or pyproject.toml names"
        raise UsageError(f"there is no format {chosen!r}{whose}; {suggestion(chosen, [*formats], 'formats')}")
    return chosen


def renderer_for(name: str, *, medium: Medium | None = None, formats: Mapping[str, str] = FORMATS) -> Renderer:
    """The renderer of a format, which is imported; `medium` is what can be shown there."""
    module, _, class_ = formats[name].partition(":")
    made: Renderer = getattr(importlib.import_module(module), class_)(medium or Medium())
    return made


def as_text(report: Report) -> str:
    """A report as text for a log."""
    return renderer_for("text").render(report)
