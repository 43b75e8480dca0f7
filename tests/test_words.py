"""Text that a user reads has none of the phrases of the word list in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
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


def docstrings(module: Path) -> Iterator[str]:
    """Yield each docstring of a module, its classes and functions; not the documentation of a rule."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield "" if node is tree and module in RULE_FILES else ast.get_docstring(node) or ""


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = {path.name: [text for text in docstrings(path) if text.split(" ")[0] in NO_BEGINNING] for path in MODULES}
    assert {path: texts for path, texts in found.items() if texts} == {}
