"""Text in dot source: labels in dot's HTML-like form, and ordinary attributes, in which every name survives.

This module is light: it never imports torch, and graphviz only when used.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

INK, FAINT = "#333333", "#767676"


def label(lines: Sequence[tuple[str, str]], *, colour: str = INK, align: str = "CENTER", one_line: bool = False) -> str:
    """An HTML-like label: lines with a style each: "b" for bold, "small", or ""."""
    written = []
    for line, style in lines:
        if not line:
            continue
        text = text_in_label(line)
        if style == "b":
            text = f"<B>{text}</B>"
        elif style == "small":
            faint = FAINT if colour == INK else colour
            text = f'<FONT POINT-SIZE="9" COLOR="{faint}">{text}</FONT>'
        written.append(text)
    between = "  " if one_line else f'<BR ALIGN="{align}"/>'
    return f'<<FONT COLOR="{colour}">{between.join(written)}</FONT>>'


def text_in_label(text: str) -> str:
    """`text` within an HTML-like label."""
    return html.escape(_shown(text).replace("\\", "\\\\")) or " "


def attribute(text: str) -> str:
    """`text` as an ordinary attribute that dot takes literally; graphviz quotes it."""
    import graphviz

    escaped: str = graphviz.escape(_shown(text))  # of a class that keeps "<...>" from being taken for a label
    return escaped


def _shown(text: str) -> str:
    """`text` with what cannot be printed spelled out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
