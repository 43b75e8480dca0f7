"""Source text: its statements, what they bind and use, which of them are needed, and its imports.

This module is light: it never imports torch.
"""

from __future__ import annotations

import ast
import builtins
import io
import itertools
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_LOOKS_AT_ITSELF = {"globals", "locals", "vars", "eval", "exec", "__import__"}
_HARMLESS_DECORATORS = {"dataclass", "dataclasses", "functools", "cache", "contextmanager", "contextlib", "torch"}
_FOREIGN = frozenset({"torch", "ddpcheck", *sys.stdlib_module_names})
"""Modules that may be left out where nothing uses them: importing them registers nothing that a model needs."""

_WIDTH = 88


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


@dataclass(slots=True)
class Statement:
    """A statement at the top of a module, with the comments before it.

    Attributes:
        text: As it was written, without blank lines around it.
        node: What was parsed.
        first: The line of the file where `text` begins, counted from 1.
        gap: The number of blank lines before it.
        binds: The names that it defines in the module.
        uses: The names that it mentions.
    """

    text: str
    node: ast.stmt
    first: int
    gap: int
    binds: frozenset[str]
    uses: frozenset[str]

    @property
    def is_definition(self) -> bool:
        return isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


@dataclass(slots=True)
class Source:
    """A module taken apart.

    Attributes:
        imports: What the import statements before the first other statement bind.
        future: The names imported from `__future__`.
        statements: Everything after, without the docstring, `__all__` and `if __name__ == "__main__"`.
    """

    imports: list[Import] = field(default_factory=list)
    future: list[str] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)

    @property
    def bound(self) -> set[str]:
        """Every name that the module defines or imports."""
        return {item.bound for item in self.imports}.union(*(s.binds for s in self.statements))


def read_source(text: str) -> Source:
    """Take a module apart.

    Raises:
        SyntaxError: It is no Python.
    """
    lines = text.splitlines()
    found = Source()
    end, leading = 0, True
    for number, nodes in enumerate(_by_line(ast.parse(text))):
        begun, end = end, max(node.end_lineno or 0 for node in nodes)
        node = nodes[0]
        if number == 0 and _is_docstring(node):
            continue
        if leading and all(isinstance(item, ast.Import | ast.ImportFrom) for item in nodes):
            for item in nodes:
                _add_import(found, item)
            continue
        leading = False
        if len(nodes) == 1 and (_is_main_guard(node) or _assigns(node, "__all__")):
            continue
        while begun < end and not lines[begun].strip():
            begun += 1
        gap = 0
        while begun - gap > 0 and not lines[begun - gap - 1].strip():
            gap += 1
        found.statements.append(
            Statement(
                text="\n".join(lines[begun:end]),
                node=node if len(nodes) == 1 else ast.Module(body=nodes, type_ignores=[]),  # type: ignore[arg-type]
                first=begun + 1,
                gap=gap,
                binds=frozenset().union(*(_binds(item) for item in nodes)),
                uses=frozenset().union(*(_uses(item) for item in nodes)),
            )
        )
    return found


def _by_line(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """The statements, those that share a line together."""
    group: list[ast.stmt] = []
    for node in tree.body:
        if group and node.lineno > (group[-1].end_lineno or 0):
            yield group
            group = []
        group.append(node)
    if group:
        yield group


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).replace('"', "'") == "__name__ == '__main__'"


def _assigns(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]


def _add_import(found: Source, node: ast.stmt) -> None:
    if isinstance(node, ast.ImportFrom) and node.module == "__future__":
        found.future += [alias.name for alias in node.names]
    else:
        found.imports += imports_of(node)


def imports_of(node: ast.AST) -> list[Import]:
    """What an import statement binds; nothing for other nodes. Relative modules begin with their dots."""
    if isinstance(node, ast.Import):
        return [Import(a.name, "", a.asname or a.name.partition(".")[0]) for a in node.names]
    if isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        return [Import(module, a.name, a.asname or a.name) for a in node.names]
    return []


def _binds(node: ast.stmt) -> frozenset[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return frozenset({node.name})
    found: set[str] = set()
    pending: list[ast.AST] = [node]
    while pending:
        item = pending.pop()
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(item.name)
            continue
        if isinstance(item, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            continue
        if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
            found.add(item.id)
        if isinstance(item, ast.ExceptHandler) and item.name:
            found.add(item.name)
        found.update(entry.bound for entry in imports_of(item))
        pending += ast.iter_child_nodes(item)
    return frozenset(found)


def _uses(node: ast.stmt) -> frozenset[str]:
    found: set[str] = set()
    for item in ast.walk(node):
        if isinstance(item, ast.Name):
            found.add(item.id)
        elif isinstance(item, ast.Constant) and isinstance(item.value, str) and item.value.isidentifier():
            found.add(item.value)  # a forward reference, or a name for getattr
    return frozenset(found)


def needed(source: Source, roots: Iterable[str], *, ours: bool = False) -> list[Statement]:
    """The statements that `roots` need, in order; those with effects of their own are needed in any case.

    Args:
        source: A module.
        roots: Names that it defines.
        ours: Whether every assignment may go that nothing uses, calls in it or not.
    """
    if not ours and any(_LOOKS_AT_ITSELF & s.uses for s in source.statements):
        return list(source.statements)
    droppable = {id(s) for s in source.statements if _droppable(s, source, ours=ours)}
    wanted = set(roots)
    kept: set[int] = set()
    grown = True
    while grown:
        grown = False
        for statement in source.statements:
            if id(statement) not in kept and (id(statement) not in droppable or statement.binds & wanted):
                kept.add(id(statement))
                wanted |= statement.uses
                grown = True
    return [statement for statement in source.statements if id(statement) in kept]


def _droppable(statement: Statement, source: Source, *, ours: bool) -> bool:
    node = statement.node
    if isinstance(node, ast.Import | ast.ImportFrom):
        return all(item.root in _FOREIGN and item.bound != "*" for item in imports_of(node))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return all(_root(d) in _HARMLESS_DECORATORS | {"pytest"} for d in node.decorator_list)
    if isinstance(node, ast.ClassDef):
        return (
            not node.keywords
            and all(_root(d) in _HARMLESS_DECORATORS | {"pytest"} for d in node.decorator_list)
            and all(_is_plain_base(_root(base), source, set()) for base in node.bases)
        )
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = all(isinstance(t, ast.Name | ast.Tuple) for t in targets)
        return names and (ours or node.value is None or _is_pure(node.value, source))
    return False


def _root(node: ast.expr) -> str:
    """The first name of `a.b(c)`."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_plain_base(name: str, source: Source, seen: set[str]) -> bool:
    """Whether a class cannot notice that another inherits from it."""
    origin = next((item for item in source.imports if item.bound == name), None)
    if origin is not None:
        return origin.root in _FOREIGN
    if name in seen:
        return True
    for statement in source.statements:
        if name in statement.binds:
            node = statement.node
            return (
                isinstance(node, ast.ClassDef)
                and not node.keywords
                and "__init_subclass__" not in {getattr(item, "name", "") for item in node.body}
                and all(_is_plain_base(_root(base), source, {*seen, name}) for base in node.bases)
            )
    return hasattr(builtins, name)


def _is_pure(value: ast.expr, source: Source) -> bool:
    recipes = {item.bound for item in source.imports if item.root == "ddpcheck"}
    pending: list[ast.AST] = [value]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.Call) and _root(node) not in recipes:
            return False
        if isinstance(node, ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr):
            return False
        pending += ast.iter_child_nodes(node)
    return True


def used_imports(imports: Iterable[Import], used: set[str]) -> list[Import]:
    """Those of `imports` that are used, or that may have an effect of their own."""
    return [i for i in imports if i.bound in used or i.bound == "*" or i.root not in _FOREIGN]


def spelled_imports(imports: Iterable[Import], *, local: set[str] = frozenset()) -> str:  # type: ignore[assignment]
    """Import statements, sorted into the standard library, what is installed, and `local` modules."""
    groups: tuple[list[str], list[str], list[str]] = ([], [], [])
    plain: dict[str, set[str]] = {}
    named: dict[str, set[str]] = {}
    for item in imports:
        if item.name:
            named.setdefault(item.module, set()).add(
                item.name if item.bound in (item.name, "*") else f"{item.name} as {item.bound}"
            )
        else:
            same = item.bound == item.root
            plain.setdefault(item.module, set()).add("" if same else f" as {item.bound}")
    for module in sorted(plain):
        groups[_section(module, local)].extend(f"import {module}{alias}" for alias in sorted(plain[module]))
    for module in sorted(named):
        names = sorted(named[module], key=lambda name: (not name.isupper(), not name[0].isupper(), name))
        line = f"from {module} import {', '.join(names)}"
        if len(line) > _WIDTH:
            line = "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])
        groups[_section(module, local)].append(line)
    return "\n\n".join("\n".join(group) for group in groups if group)


def _section(module: str, local: set[str]) -> int:
    root = module.partition(".")[0]
    return 0 if root in sys.stdlib_module_names else 2 if root in local or not root else 1


def joined(statements: Sequence[Statement]) -> tuple[str, list[tuple[int, int, int]]]:
    """The statements as text, spaced as they were, and (line in the file, line in the text, lines) of each."""
    out: list[str] = []
    places: list[tuple[int, int, int]] = []
    previous: Statement | None = None
    for statement in statements:
        if previous is not None:
            follows = previous.first + previous.text.count("\n") + statement.gap + 1 == statement.first
            apart = 2 if previous.is_definition or statement.is_definition else 1
            out += [""] * (statement.gap if follows else apart)
        lines = statement.text.split("\n")
        places.append((statement.first, len(out) + 1, len(lines)))
        out += lines
        previous = statement
    return "\n".join(out), places


def free_names(names: Iterable[str], taken: Callable[[str], bool]) -> dict[str, str]:
    """Another spelling for each of `names`."""
    changes: dict[str, str] = {}
    for name in names:
        changes[name] = f"{name}_"
        while taken(changes[name]):
            changes[name] += "_"
    return changes


def renamed(text: str, changes: Mapping[str, str]) -> str:
    """`text` with other names; attributes, keyword arguments and words in strings keep theirs."""
    if not changes:
        return text
    pattern = re.compile(rf"(?<![.\w])({'|'.join(map(re.escape, changes))})\b(?!=[^=])")

    def change(code: str) -> str:
        return pattern.sub(lambda found: changes[found[1]], code)

    lines = text.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    out, at = [], 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        literal = token.type == tokenize.STRING or tokenize.tok_name[token.type] == "FSTRING_MIDDLE"
        if literal or token.type == tokenize.COMMENT:
            first, last = (starts[row - 1] + column for row, column in (token.start, token.end))
            formatted = re.match("[rR]?[fF]", token.string) and token.type == tokenize.STRING
            inside = re.sub(r"\{[^{}]*\}", lambda found: change(found[0]), token.string)
            out += [change(text[at:first]), inside if formatted else text[first:last]]
            at = last
    return "".join([*out, change(text[at:])])
