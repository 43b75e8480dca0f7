"""What every page has: elements that escape what they hold, the frame of the file, and the data inside it.

This module is light: it never imports torch.
"""

from __future__ import annotations

import base64
import html
import re
import unicodedata
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from ddpcheck.findings.report import Report
from ddpcheck.findings.shortening import shortened
from ddpcheck.render import Medium, json_escaped
from ddpcheck.report.matrix.matrix import Matrix

_PLAIN = 200_000  # characters of JSON up to which it stands in the page as it is
_MOST_DATA = 1 << 28
_VOID = ("meta", "link", "br", "line", "circle", "rect", "path")
_NOTHING_ELSE = "default-src 'none'; style-src 'unsafe-inline'"  # the browser refuses requests and scripts
_DATA = re.compile(r'<script type="application/(json|zlib)" id="ddpcheck-data">([^<]*)</script>')


class Markup(str):
    """Text that is markup already, as `tag` makes it."""

    __slots__ = ()


Content: TypeAlias = "str | Iterable[Content] | None"
"""Text, which is escaped unless it is `Markup`; nothing; or several of these."""


Sections: TypeAlias = "Mapping[str, tuple[str, Content]]"
"""By id, the heading of each section of a page and what it holds."""


def tag(name: str, /, *content: Content, **attributes: str | float | None) -> Markup:
    """An element; what it holds is escaped. In names of attributes `_` is "-", and one at the end is left off."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID and not content:
        return Markup(f"<{name}{given}/>")
    return Markup(f"<{name}{given}>{markup(*content)}</{name}>")


def markup(*content: Content) -> Markup:
    """Content one after the other, escaped where it is not markup already."""
    parts = []
    for one in content:
        if isinstance(one, Markup):
            parts.append(str(one))
        elif isinstance(one, str):
            parts.append(_escaped(one))
        elif one is not None:
            parts.append(markup(*one))
    return Markup("".join(parts))


def visible(text: str) -> str:
    """`text` with characters that would not be seen, or would change the rest, written out, as repr does it.

    Emoji go by their names ("[beach with umbrella]"): where a font lacks them, they are all the same box.
    """
    return "".join(c if c == "\n" or (c.isascii() and c.isprintable()) else _written_out(c) for c in text)


_EMOJI = 0x1F000  # and what follows
_AS_EMOJI = "\ufe0f"  # after a character that may be one


def _written_out(character: str) -> str:
    if not character.isprintable():
        return repr(character)[1:-1]
    if ord(character) >= _EMOJI and unicodedata.category(character) == "So":
        return f"[{unicodedata.name(character, 'emoji').lower()}]"
    return "" if character == _AS_EMOJI else character


def _escaped(text: str) -> str:
    return html.escape(visible(text))


def code(text: str, most: int = 300) -> Markup:
    """A name, or a piece of code, which may break anywhere."""
    return tag("code", shortened(text, most))


def _section(name: str, title: str, content: Content) -> Markup:
    heading = tag("h2", title, id=f"{name}-title")
    return tag("section", heading, content, id=name, aria_labelledby=f"{name}-title")


def folded(summary: Content, *content: Content, is_open: bool = False) -> Markup:
    """Content that a click shows, and a printed page does."""
    return tag("details", tag("summary", summary), *content, open="" if is_open else None)


_MARKS = {"tick": "M2 6.5 L5 9.5 L10 2.5", "cross": "M2.5 2.5 L9.5 9.5 M9.5 2.5 L2.5 9.5"}


def mark(name: str) -> Markup:
    """A tick or a cross, drawn: not every font has the characters. Another mark is the text that it is."""
    if name not in _MARKS:
        return tag("span", name, aria_hidden="true")
    return tag("svg", tag("path", d=_MARKS[name]), viewBox="0 0 12 12", class_="mark", aria_hidden="true")


def brief(text: str, most: int) -> Markup:
    """A name in one line: of a long one the beginning and the end, and all of it where the pointer rests."""
    if len(text) <= most:
        return tag("code", text)
    return tag("code", fitted(text, most), title=text)


def fitted(text: str, most: int) -> str:
    """`text`, of a long one its beginning and its end."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-(most // 2) :]}"


def table(headings: Iterable[str], rows: Iterable[Iterable[Content]], caption: str, class_: str = "") -> Markup:
    """A table that scrolls in its own box where it is too wide."""
    head = tag("thead", tag("tr", [tag("th", heading, scope="col") for heading in headings]))
    body = tag("tbody", [tag("tr", [tag("td", cell) for cell in row]) for row in rows])
    made = tag("table", tag("caption", caption), head, body, class_=class_ or None)
    return tag("div", made, class_="scrolls", tabindex=0, role="region", aria_label=caption)


def page(report: Report | Matrix, top: Content, sections: Sections, medium: Medium) -> str:
    """The whole file.

    Args:
        report: That is on the page; its data stands inside.
        top: What comes first.
        sections: In order; each has a heading, which the navigation leads to.
        medium: Where it goes.
    """
    links = [tag("a", words, href=f"#{name}") for name, (words, _) in sections.items()]
    body = tag(
        "body",
        tag("a", "Skip to the content", href="#content", class_="skip"),
        tag("header", top),
        tag("nav", links, aria_label="Sections of this page"),
        tag("main", [_section(name, *one) for name, one in sections.items()], id="content"),
        tag("footer", tag("p", "Made by ddpcheck. This file makes no request and needs no script.")),
        _data(report),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_NOTHING_ELSE),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"ddpcheck: {shortened(report.target, 80)}"),
        tag("style", Markup(Path(__file__).with_name("page.css").read_text("utf-8"))),
    )
    text = f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"
    return text if medium.shows(text) else text.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _data(report: Report | Matrix) -> Markup:
    """The report as JSON, in which no character means anything to HTML; compressed where it is large."""
    text = report.to_json(indent=None)
    kind = "json"
    if len(text) > _PLAIN:
        kind = "zlib"
        text = base64.b64encode(zlib.compress(text.encode("utf-8", "surrogatepass"), 9)).decode()
    else:
        text = "".join(c if " " <= c <= "~" and c not in "<>&" else json_escaped(c) for c in text)
    return Markup(f'<script type="application/{kind}" id="ddpcheck-data">{text}</script>')


def data_in(page: str) -> str | None:
    """The JSON of the report that a page is of; None where `page` is no such page.

    Raises:
        ValueError: The data is damaged.
    """
    if not page.lstrip().lower().startswith("<!doctype html"):
        return None
    found = _DATA.search(page)
    if found is None:
        return None
    if found[1] == "json":
        return found[2]
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(base64.b64decode(found[2], validate=True), _MOST_DATA)
    except (zlib.error, ValueError) as error:
        raise ValueError(f"the data in the page is damaged ({error})") from None
    if not reader.eof:
        raise ValueError("the data in the page is not whole")
    return data.decode("utf-8", "surrogatepass")
