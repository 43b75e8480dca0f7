"""Renderers (`Renderer.render(report) -> str`) and the registry of formats.

A renderer reads only the `Report`. To add a format, add a module with a renderer and an entry in `FORMATS`.
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

from ddpcheck import load_extra
from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.report import Document, Report
from ddpcheck.findings.wording import suggestion


@dataclass(frozen=True, slots=True)
class Medium:
    """Capabilities of the output stream; the defaults suit a file or log."""

    width: int | None = None  # columns; `None` for no line breaks
    colour: bool = False  # True if colours are supported
    encoding: str = "utf-8"  # character encoding
    interactive: bool = False  # True for a terminal
    whole: bool = False  # True to show all names, evidence and traceback frames
    quiet: bool = False  # True to show only the verdict

    @classmethod
    def detect(cls, stream: TextIO | None, environ: Mapping[str, str] | None = None) -> Medium:
        """Return the medium of `stream` (`None`: a closed stream); reads NO_COLOR, FORCE_COLOR, TERM, COLUMNS."""
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
        try:
            text.encode(self.encoding)
        except (UnicodeEncodeError, LookupError):
            return False
        return True

    def fitted(self, text: str) -> str:
        """Escape characters of `text` that the stream cannot encode, as Python does."""
        return text if self.shows(text) else text.encode(self.encoding, "backslashreplace").decode(self.encoding)


class Renderer:
    """Base class that renders a report, matrix or difference for a medium."""

    def __init__(self, medium: Medium) -> None:
        self.medium = medium

    def render(self, report: Any) -> str:
        """Return the whole output, ending with a newline."""
        raise NotImplementedError


class JsonRenderer(Renderer):
    """JSON renderer for `Report.from_json`, `Matrix.from_json`, and differences."""

    def render(self, report: Document) -> str:
        """Return JSON with sorted keys; ASCII only if the medium cannot show the text."""
        text = report.to_json()
        return (text if self.medium.shows(text) else in_ascii(text)) + "\n"


def in_ascii(text: str, besides: str = "") -> str:
    """Escape the non-ASCII characters of JSON text, and the characters in `besides`."""
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

MATRIX_FORMATS = {"json": _JSON, "html": _HTML, "text": "ddpcheck.extras.matrix.matrix_terminal:MatrixTerminalRenderer"}
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
    """Return the format: `name`, else by extension of `path`, else `default`, else "text".

    Raises UsageError for a format or extension that is not in `formats`.
    """
    if name is None and path is not None:
        choices = {extension: form for extension, form in _EXTENSIONS.items() if form in formats}
        name = choices.get(PurePath(path).suffix.lower())
        if name is None and default is None:
            raise UsageError(
                f"cannot determine the format from the name {path!r}: use one of {', '.join(choices)}, or name a format"
            )
    result = name or default or "text"
    if result not in formats:
        source = "" if name else ", which the environment or pyproject.toml names"
        raise UsageError(f"there is no format {result!r}{source}; {suggestion(result, [*formats], 'formats')}")
    return result


def renderer_for(name: str, *, medium: Medium | None = None, formats: Mapping[str, str] = FORMATS) -> Renderer:
    """Import and construct the renderer of a format for a medium."""
    module, _, class_ = formats[name].partition(":")
    extra = module.removeprefix("ddpcheck.extras.")
    home = importlib.import_module(module) if extra == module else load_extra(extra)
    renderer: Renderer = getattr(home, class_)(medium or Medium())
    return renderer


def as_text(report: Report) -> str:
    """Return a report as text for a log."""
    return renderer_for("text").render(report)
