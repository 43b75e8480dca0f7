"""Write docs/rules-in-code.md: for each rule its judges, the facts that they decide on, and who gathers these.

    python -m tests.faultsuite.rules_in_code

Read from the source: a judge of a rule is a public function of `judge/` that names its code, or calls a function of its
file which does; its facts are the classes of evidence that these functions name, or reach through the classes that put
evidence together; who gathers a fact constructs that class.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ddpcheck.findings.rules import RULES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "rules-in-code.md"
PACKAGE = ROOT / "ddpcheck"
FACTS = ("findings/evidence/", "stream/entries.py", "stream/rank_report.py")
GATHER = ("gather/", "record/", "run/", "report/", "extras/", "monitor/", "harness.py", "worlds/")
TABLES = tuple(f"judge/{name}.py" for name in ("script_table", "optimizer_lines", "wrapper_lines", "causes", "verdict"))
"""Files that name codes which others give."""
CODE = re.compile(r"DDP\d{3}")
HEAD = """<!-- From the source, by `python -m tests.faultsuite.rules_in_code`. -->
# Where a rule lives in the code

For each rule: the functions that judge it, the facts on which they decide, and what gathers these. A path is one in
`ddpcheck/`. Facts are the classes of `findings/evidence/` and `stream/`. What a rule says is in `findings/rules/`.

| rule | judge | facts | gathered by |
|---|---|---|---|
"""


@dataclass(slots=True)
class Judges:
    """The functions of one file of `judge/` that have to do with a rule, and the classes of facts that these name."""

    file: str
    functions: list[str]
    facts: set[str] = field(default_factory=set)


def names_in(node: ast.AST) -> set[str]:
    """All names and attributes in a piece of code."""
    return {
        n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)
    }


def codes_in(node: ast.AST) -> set[str]:
    """The codes that are string constants in it."""
    constants = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
    return {value for value in constants if isinstance(value, str) and CODE.fullmatch(value)}


def modules() -> dict[str, ast.Module]:
    """All modules of ddpcheck, by path."""
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def classes_in(tree: ast.Module) -> list[ast.ClassDef]:
    """The classes of a module."""
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def facts_of(trees: dict[str, ast.Module]) -> dict[str, dict[str, set[str]]]:
    """By class: the classes of facts that each of its fields and methods names, and what it is or holds itself."""
    facts = {node.name for file, tree in trees.items() if file.startswith(FACTS) for node in classes_in(tree)}
    found = {}
    for file, tree in trees.items():
        for node in classes_in(tree) if file.startswith((*FACTS, "judge/")) else ():
            methods = {one.name: facts & names_in(one) for one in node.body if isinstance(one, ast.FunctionDef)}
            fields = {
                one.target.id: facts & names_in(one)
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            }
            itself = {node.name} if node.name in facts else set().union(*fields.values())
            found[node.name] = {**methods, **fields, node.name: itself}
    return found


def makers_of(trees: dict[str, ast.Module], facts: set[str]) -> dict[str, set[str]]:
    """By class of facts, the files that construct it."""
    made = defaultdict(set)
    for file, tree in trees.items():
        for node in ast.walk(tree) if file.startswith(GATHER) else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in facts:
                made[node.func.id].add(file)
    return made


def judges_in(
    file: str, trees: dict[str, ast.Module], facts: dict[str, dict[str, set[str]]], made: dict[str, set[str]]
) -> Iterator[tuple[str, Judges]]:
    """Each rule that a file of `judge/` gives, with its functions there."""
    tree = trees[file]
    parts: dict[str, ast.AST] = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    functions = set(parts)
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    imported = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    known = {one.name for node in imported for one in node.names}.union(node.name for node in classes_in(tree))
    for node in imported:  # the classes that put facts together lead to each other
        if (theirs := trees.get(f"{(node.module or '').removeprefix('ddpcheck.').replace('.', '/')}.py")) is not None:
            known |= {one.name for one in classes_in(theirs) if one.name not in made}
    reach = [facts[name] for name in known if name in facts]
    named = {name: names_in(node) for name, node in parts.items()}
    gives = {name: codes_in(node) for name, node in parts.items()}
    for code in sorted(set().union(*gives.values())):
        reached = {name for name, codes in gives.items() if code in codes}
        while more := {name for name in parts if named[name] & reached} - reached:
            reached |= more
        inside = set().union(*(named[name] for name in reached))
        judges = sorted(name for name in reached & functions if not name.startswith("_"))
        yield code, Judges(file, judges, set().union(*(one.get(name, set()) for name in inside for one in reach)))


def quoted(names: list[str]) -> str:
    """Names as code."""
    return ", ".join(f"`{name}`" for name in names)


@cache
def found() -> tuple[dict[str, list[Judges]], dict[str, set[str]]]:
    """By code its judges, and by class of facts the files that construct it."""
    trees = modules()
    facts = facts_of(trees)
    made = makers_of(trees, set(facts))
    by_code: dict[str, list[Judges]] = defaultdict(list)
    for file in trees:
        if file.startswith("judge/") and file not in TABLES:
            for code, judges in judges_in(file, trees, facts, made):
                by_code[code].append(judges)
    return by_code, made


def page() -> str:
    """The page."""
    by_code, made = found()
    rows = []
    for code in RULES:
        for number, one in enumerate(sorted(by_code[code], key=lambda judges: judges.file)):
            which = f"[{code}](rules/{code}.md)" if not number else ""
            gathered = sorted(set().union(*(made[name] for name in one.facts)))
            columns = (which, f"`{one.file}`: {quoted(one.functions)}", quoted(sorted(one.facts)), quoted(gathered))
            rows.append(f"| {' | '.join(columns)} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
