"""How Sphinx builds the documentation: `make docs`."""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

import ddpcheck

project = "ddpcheck"
author = "The ddpcheck authors"
copyright = author
version = release = ddpcheck.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
exclude_patterns = ["build"]
nitpicky = False
suppress_warnings = ["misc.highlighting_failure"]  # what a program prints is no code

# Docstrings are Google style and mark code by single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
add_module_names = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # types are in the signature
smartquotes_action = "D"  # quotes are literal, as in messages

html_theme = "furo"
html_title = f"ddpcheck {version}"
html_static_path = ["_static"]
html_css_files = ["ddpcheck.css"]
html_show_sphinx = False
html_copy_source = False

# Links to files outside of docs/ work on GitHub. Here a file is offered as it is, and a folder or a page of the
# repository is named.
_OUTSIDE = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<path>\.\./[^)#]+)\)")


def name_what_is_outside(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace links to folders and to pages outside of docs/ by their names."""
    folder = (Path(app.srcdir) / page).parent

    def named(match: re.Match[str]) -> str:
        path = (folder / match["path"]).resolve()
        inside = path.is_relative_to(app.srcdir)
        return match["text"] if not inside and (path.is_dir() or path.suffix == ".md") else match.group(0)

    source[0] = _OUTSIDE.sub(named, source[0])


def list_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """Put pages below the list that names them, and those that no list names into the guides."""
    if page == "rules":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\nrules/*\n```\n"
    folder = Path(app.srcdir)
    listed = {
        name: _listed((folder / f"{name}.md").read_text(encoding="utf-8")) for name in ("measured", "contributors")
    }
    listed["measured"] = [name for name in listed["measured"] if name not in listed["contributors"]]
    if page in listed:
        source[0] += "\n".join(["\n```{toctree}", ":hidden:", "", *listed[page], "```", ""])
    if page == "index":
        named = {*source[0].split(), *listed["measured"], *listed["contributors"], "index"}
        others = sorted(path.stem for path in folder.glob("*.md") if path.stem not in named)
        source[0] = source[0].replace("\ncommand-line\n", "\n".join(["\ncommand-line", *others, ""]))


def _listed(text: str) -> list[str]:
    """The pages in the tables of a page."""
    return re.findall(r"^\| \[[^]]*\]\(([\w-]+)\.md\)", text, re.MULTILINE)


_LONG_PATH = re.compile(r"(\S{12,}/\S*)")


def scroll_wide_tables(app: Sphinx, page: nodes.document) -> None:
    """Mark tables, so that wide ones scroll, and let long paths in them break after slashes and underscores."""
    for table in page.findall(nodes.table):
        table["classes"].append("scrolls")
        for text in [*table.findall(nodes.Text)]:
            if not isinstance(text.parent, nodes.literal) and _LONG_PATH.search(text):
                parts = re.split(r"(?<=[/_])(?=\S)", text)
                breaks = [item for part in parts for item in (nodes.raw("", "<wbr>", format="html"), nodes.Text(part))]
                text.parent.replace(text, breaks[1:])


def shorten_types(app: Sphinx, what: str, name: str, thing: object, options: object, sign: str, back: str) -> object:
    """Write types by their names alone, without the modules that they are in."""
    return tuple(re.sub(r"~?\b(?:\w+\.)+(?=[A-Za-z_])", "", text or "") or None for text in (sign, back))


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("source-read", name_what_is_outside)
    app.connect("source-read", list_pages)
    app.connect("env-get-outdated", lambda *_: ["index"])  # a new page may have come
    app.connect("autodoc-process-signature", shorten_types)
    app.connect("doctree-read", scroll_wide_tables)
