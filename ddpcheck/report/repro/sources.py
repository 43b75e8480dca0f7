"""Python source: what import statements bind, and our own definitions that stand in a script.

This module is light: it never imports torch.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parents[2]
_WIDTH = 88
COMPANIONS = {
    "QuietRandomness": "quiet_random",
    "quiet_modules": "quiet_random",
    "synchronised_on_cpu": "cpu_sync_batchnorm",
}
"""Code of ddpcheck that is too long for a script, and the file beside the script that has a copy."""


@dataclass(frozen=True, slots=True, order=True)
class Import:
    """One name that an import statement binds: `import module as bound`, or `from module import name as bound`."""

    module: str
    name: str
    bound: str

    @property
    def root(self) -> str:
        """The outermost package."""
        return self.module.partition(".")[0]

    @property
    def path(self) -> str:
        """Full name of the thing that is bound, whichever way it was imported."""
        whole = f"{self.module}.{self.name}" if self.name else self.module
        return self.root if not self.name and self.bound == self.root else whole


def imports_of(node: ast.AST) -> list[Import]:
    """The names that an import statement binds; none for other nodes. Relative modules begin with their dots."""
    if isinstance(node, ast.Import):
        return [Import(a.name, "", a.asname or a.name.partition(".")[0]) for a in node.names]
    if isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        return [Import(module, a.name, a.asname or a.name) for a in node.names]
    return []


def names_in(node: ast.AST) -> set[str]:
    """The names that a piece of code mentions, without attributes and arguments."""
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}


@dataclass(frozen=True, slots=True)
class Definition:
    """A function, class or assignment at the top of a module of ours.

    Attributes:
        module: Where it is.
        text: As it is written there, without what is for type checkers only.
        binds: The names that it defines.
        uses: The names that it mentions.
        is_block: Whether it is a function or a class.
    """

    module: str
    text: str
    binds: frozenset[str]
    uses: frozenset[str]
    is_block: bool


@dataclass(slots=True)
class Library:
    """Modules of ours, taken apart.

    Attributes:
        definitions: Of all of them, in order.
        imports: What they import from elsewhere.
        companions: The companions that they import, and the module of ddpcheck that each name is from.
    """

    definitions: list[Definition] = field(default_factory=list)
    imports: set[Import] = field(default_factory=set)
    companions: dict[str, str] = field(default_factory=dict)

    def needed(self, roots: Iterable[str]) -> list[Definition]:
        """The definitions that `roots` need, in order."""
        by_name = {name: definition for definition in self.definitions for name in definition.binds}
        pending, kept = list(roots), set[Definition]()
        while pending:
            definition = by_name.get(pending.pop())
            if definition is not None and definition not in kept:
                kept.add(definition)
                pending += definition.uses
        return [definition for definition in self.definitions if definition in kept]

    def imports_for(self, used: set[str]) -> list[Import]:
        """The imports that bind what is `used`."""
        return sorted(item for item in self.imports if item.bound in used)


@cache
def library(*modules: str) -> Library:
    """Take `modules` of ddpcheck apart, and those that they import from it."""
    found, pending, read = Library(), list(modules), set[str]()
    while pending:
        module = pending.pop(0)
        if module in read:
            continue
        read.add(module)
        text = path_of(module).read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            for item in imports_of(node):
                if item.root != "ddpcheck":
                    found.imports.add(item)
                elif item.name in COMPANIONS:
                    found.companions[item.name] = item.module
                    found.imports.add(Import(COMPANIONS[item.name], item.name, item.bound))
                elif item.name != "passes_on":
                    pending.append(item.module)
        found.definitions += _definitions(module, text)
    return found


def path_of(module: str) -> Path:
    """The file of a module of ddpcheck."""
    return _PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")


def _definitions(module: str, text: str) -> Iterator[Definition]:
    lines = text.split("\n")
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign):
            continue
        is_block = isinstance(node, ast.FunctionDef | ast.ClassDef)
        binds = {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set[str]()
        if not is_block:
            binds = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        own = lines[first_line(node) - 1 : node.end_lineno]
        # `passes_on` says whose a failure is, which a script need not know
        kept = [line.partition("  # type: ignore")[0] for line in own if line.strip() != "@passes_on"]
        yield Definition(module, "\n".join(kept), frozenset(binds), frozenset(names_in(node)), is_block)


def first_line(node: ast.stmt) -> int:
    """The line in which a statement begins, its decorators included."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(item.lineno for item in decorators)])


def spelled_definitions(definitions: Iterable[Definition]) -> str:
    """Definitions as text: assignments together, functions and classes apart."""
    text, after_block = "", True
    for definition in definitions:
        apart = "\n\n\n" if definition.is_block or after_block else "\n"
        text += (apart if text else "") + definition.text
        after_block = definition.is_block
    return text


def spelled_imports(imports: Iterable[Import], *, local: Iterable[str] = ()) -> str:
    """Import statements, sorted into the standard library, what is installed, and `local` modules."""
    groups: tuple[list[str], list[str], list[str]] = ([], [], [])
    named: dict[str, list[str]] = {}
    for item in sorted(imports):
        alias = "" if item.bound in (item.name, item.root) else f" as {item.bound}"
        if item.name:
            named.setdefault(item.module, []).append(item.name + alias)
        else:
            groups[_section(item.root, local)].append(f"import {item.module}{alias}")
    for module, names in named.items():
        line = f"from {module} import {', '.join(names)}"
        if len(line) > _WIDTH:
            line = "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])
        groups[_section(module.partition(".")[0], local)].append(line)
    return "\n\n".join("\n".join(group) for group in groups if group)


def _section(root: str, local: Iterable[str]) -> int:
    return 0 if root in sys.stdlib_module_names else 2 if root in local else 1
