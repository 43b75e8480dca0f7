"""Text that a user reads has none of the phrases of the word list in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from itertools import chain
from pathlib import Path

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
    r"(?<![\w-])(?:"
    + "|".join(
        r"\s+".join(r"[\w.()\'-]+" if word == "…" else re.escape(word) for word in phrase.split()) for phrase in WORDS
    )
    + r")(?![\w-])",
    re.IGNORECASE,
)


def found_in(text: str) -> list[str]:
    return [text[max(match.start() - 30, 0) : match.end() + 30] for match in PATTERN.finditer(text)]


# Beginnings of docstrings that torch's own source does not have; "Return True if" and a noun take their place.
NO_BEGINNING = {"Whether", "What", "Those", "Of", "How", "Where", "That"}
MOST_WORDS = 14  # of the first line of a docstring
# Names that say nothing of what they name: the name of a step is `step`, and of steps by rank `steps_by_rank`.
NO_NAME = {
    *("alone", "apart", "found", "given", "held", "left", "of_rank", "of_ranks", "one", "other", "place", "said"),
    *("theirs", "told"),
}
ALLOWED = {"gather": 2, "worlds": 1}
"""Names in `NO_NAME` by package: of arguments of `__add__`, and of a hook of pytest. Never raise a number."""
RECORDED = {  # classes whose fields are formats of logs and records, or public; by file or folder
    *(ROOT / "ddpcheck" / "findings" / "evidence").glob("*.py"),
    *(ROOT / "ddpcheck" / name for name in ("findings/errors.py", "stream/entries.py", "stream/rank_report.py")),
}


@functools.cache
def words_of(module: Path) -> tuple[list[str], list[str], list[str]]:
    """What a module says and defines, from one walk.

    Its strings that are sentences or parts of one, with X for what is formatted; the docstrings of the module, its
    classes and functions, not the documentation of a rule; and the names of functions, arguments, variables and fields.
    """
    tree = ast.parse(module.read_text(encoding="utf-8"))
    texts: list[str] = []
    docstrings: list[str] = []
    names: list[str] = []
    passed: set[ast.expr] = set()  # a walk arrives at a node before it does at its parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node is not tree or module not in RULE_FILES:
                docstrings.append(ast.get_docstring(node) or "")
        match node:
            case ast.Expr():
                passed.add(node.value)
            case ast.JoinedStr():
                passed.update(node.values)
                texts.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
                )
            case ast.Constant(value=str(text)) if node not in passed:
                texts.append(text)
            case ast.ClassDef() if module in RECORDED:
                passed.update(stmt.target for stmt in node.body if isinstance(stmt, ast.AnnAssign))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
                names.append(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) if node not in passed:
                names.append(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                names.append(name)
    return texts, docstrings, names


def test_pages_rules_and_messages_have_plain_words() -> None:
    assert len(WORDS) > 50 and found_in("The ranks part there, by itself") and found_in("what module has")
    assert found_in("where each part thereof is") == []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert found_in(re.sub(r"`[^`]*`", "X", text)) == [], page.name
    for code, rule in RULES.items():
        assert found_in("\n".join((rule.summary, *(text for _, text in sections_of(rule))))) == [], code
    phrases = {path.relative_to(ROOT).as_posix(): [*chain(*map(found_in, words_of(path)[0]))] for path in MODULES}
    assert {path: phrases for path, phrases in phrases.items() if phrases} == {}


def test_docstrings_begin_with_a_verb_or_a_noun_and_a_short_line() -> None:
    lines = [(path.name, text.partition("\n")[0].split(" ")) for path in MODULES for text in words_of(path)[1]]
    assert [(name, words) for name, words in lines if words[0] in NO_BEGINNING or len(words) > MOST_WORDS] == []


def test_names_say_what_they_name() -> None:
    packages = [module.relative_to(ROOT / "ddpcheck").parts[0] for module in MODULES]
    names = [(package, words_of(module)[2]) for package, module in zip(packages, MODULES, strict=True)]
    counts = Counter(package for package, names in names for name in names if name.strip("_") in NO_NAME)
    assert {package: count for package, count in counts.items() if count > ALLOWED.get(package, 0)} == {}
