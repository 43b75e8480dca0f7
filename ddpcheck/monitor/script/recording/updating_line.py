"""The line of a program that gives a variable a new value made of its old one."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import parsed_source, relative_path
from ddpcheck.monitor.script.recording.line_recorder import program_files


@functools.cache
def updating_line(path: str) -> Location | None:
    """The one of `path`, as "norm.mean" or "stats['mean']"; where none is made of the old value, the last that is set.

    What constructs the object, or stands at the top of a file, is no update; a function beside others that assign the
    same name is known by the variable.
    """
    names = re.findall(r"[^\W\d]\w*", path)
    found = [(score, line) for name in names[-1:] for score, line in _assignments(name)]
    if not found and len(names) > 1:  # an item of what is replaced as a whole
        found = [(score, line) for score, line in _assignments(names[-2])]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _assignments(name: str) -> Iterator[tuple[tuple[bool, bool], Location]]:
    for file in program_files():
        for node, repeats in _statements(parsed_source(file) or ast.Module([], []), repeats=False):
            if (reads := _updates(node, name)) is not None:
                yield (reads, repeats), Location(relative_path(file), node.lineno)


def _statements(around: ast.AST, *, repeats: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """All in `around`, and whether each may run more than once: in a function that constructs nothing, or in a loop."""
    if isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef):
        repeats = around.name != "__init__"
    repeats |= isinstance(around, ast.For | ast.While)
    for node in ast.iter_child_nodes(around):
        if isinstance(node, ast.stmt):
            yield node, repeats
        yield from _statements(node, repeats=repeats)


def _updates(node: ast.AST, name: str) -> bool | None:
    """Whether a statement gives `name` a value that is made of it; `None` for one that gives it none."""
    if isinstance(node, ast.AugAssign):
        return True if _names(node.target, name) else None
    if isinstance(node, ast.Assign):
        if any(_names(target, name) for target in node.targets):
            return any(_is(part, name) for part in ast.walk(node.value))
        return None
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called: ast.expr = node.value
        while isinstance(called, ast.Call) and isinstance(called.func, ast.Attribute):
            if called.func.attr.endswith("_") and _is(called.func.value, name):
                return True
            called = called.func.value
    return None


def _names(target: ast.expr, name: str) -> bool:
    if isinstance(target, ast.Tuple | ast.List):
        return any(_names(one, name) for one in target.elts)
    return _is(target, name) or (isinstance(target, ast.Subscript) and _is(target.value, name))


def _is(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == name
    return (isinstance(node, ast.Attribute) and node.attr == name) or (isinstance(node, ast.Name) and node.id == name)
