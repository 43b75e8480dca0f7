"""Text that a user reads has none of the phrases of the word list in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from ddpcheck.findings.rules import RULES, sections_of
from tests.readme import DOCS, README, ROOT

PAGES = [README, *sorted(DOCS.glob("*.md"))]
MODULES = sorted((ROOT / "ddpcheck").rglob("*.py"))
RULE_FILES = {*(ROOT / "ddpcheck" / "rules").glob("*/ddp[0-9]*.py")}  # their docstrings document rules


def word_list() -> dict[str, str]:
    """Each phrase of the table, and what to say in its place."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("### Words\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.*?) \|$", section, re.MULTILINE)
    return {phrase: better for better, phrases in rows for phrase in re.findall(r"`([^`]+)`", phrases)}


WORDS = word_list()
PATTERN = re.compile(
    "|".join(
        r"(?<![\w-])"
        + r"\s+".join(r"[\w.()\'-]+" if word == "…" else re.escape(word) for word in phrase.split())
        + r"(?![\w-])"
        for phrase in WORDS
    ),
    re.IGNORECASE,
)


def prose(page: Path) -> str:
    """The text of a page without code and what a command prints."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"`[^`]*`", "X", text)


def texts(module: Path) -> Iterator[str]:
    """The strings of a module that are sentences, or parts of one, with X for what is formatted: no docstrings."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    left_out = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            left_out |= {id(part) for part in node.values}
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            yield node.value


def found_in(text: str) -> list[str]:
    return [text[max(match.start() - 30, 0) : match.end() + 30] for match in PATTERN.finditer(text)]


def test_the_word_list_is_read() -> None:
    assert len(WORDS) > 50 and found_in("The ranks part there, by itself") and found_in("what module has")
    assert found_in("where each part thereof is") == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_plain_words(page: Path) -> None:
    assert found_in(prose(page)) == []


def test_rules_have_plain_words() -> None:
    found = {code: found_in("\n".join(text for _, text in sections_of(rule))) for code, rule in RULES.items()}
    assert {code: phrases for code, phrases in found.items() if phrases} == {}
    assert [code for code, rule in RULES.items() if found_in(rule.summary)] == []


def test_messages_have_plain_words() -> None:
    found = {path.relative_to(ROOT).as_posix(): [*chain(*map(found_in, texts(path)))] for path in MODULES}
    assert {path: phrases for path, phrases in found.items() if phrases} == {}


# Beginnings of docstrings that torch's own source does not have; "Return True if" and a noun take their place.
NO_BEGINNING = {"Whether", "What", "Those", "Of", "How", "Where", "That"}


@functools.cache
def docstrings(module: Path) -> list[str]:
    """Return each docstring of a module, its classes and functions; not the documentation of a rule."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return [ast.get_docstring(node) or "" for node in nodes if node is not tree or module not in RULE_FILES]


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = {path.name: [text for text in docstrings(path) if text.split(" ")[0] in NO_BEGINNING] for path in MODULES}
    assert {path: texts for path, texts in found.items() if texts} == {}


# Names that say nothing of what they name: the name of a step is `step`, and of steps by rank `steps_by_rank`.
NO_NAME = {
    *("alone", "apart", "found", "given", "held", "left", "of_rank", "of_ranks", "one", "other", "place", "said"),
    *("theirs", "told"),
}
RECORDED = {  # classes whose fields are formats of logs and records, or public; by file or folder
    *(ROOT / "ddpcheck" / "findings" / "evidence").glob("*.py"),
    *(ROOT / "ddpcheck" / name for name in ("findings/errors.py", "stream/entries.py", "stream/rank_report.py")),
}
MOST_WORDS = 14  # of the first line of a docstring

ALLOWED = {"gather": 2, "worlds": 1}
"""Names in `NO_NAME` by package: of arguments of `__add__`, and of a hook of pytest. Never raise a number."""


def names_in(module: Path) -> Iterator[str]:
    """Yield the names of functions, arguments, variables and fields that a module defines."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and module in RECORDED]
    recorded = {stmt.target for node in classes for stmt in node.body if isinstance(stmt, ast.AnnAssign)}
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                if node not in recorded:
                    yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name


def package_of(module: Path) -> str:
    """Return the package of a module; the name of a module beside the packages."""
    return module.relative_to(ROOT / "ddpcheck").parts[0]


def test_names_say_what_they_name() -> None:
    names = [(package_of(module), name.strip("_")) for module in MODULES for name in names_in(module)]
    counts = Counter(package for package, name in names if name in NO_NAME)
    assert {package: count for package, count in counts.items() if count > ALLOWED.get(package, 0)} == {}


def test_docstrings_begin_with_a_short_line() -> None:
    lines = [text.split("\n")[0] for module in MODULES for text in docstrings(module)]
    assert [line for line in lines if len(line.split()) > MOST_WORDS] == []
