"""The line of a program that assigns an attribute, or gives a variable a new value made of its old one.

It is the line to change, and decides nothing: that values differ between ranks, or have changed, is measured. Where no
line is found, or another one, the finding is the same at the place where it was noticed, or at that line.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from types import FunctionType, ModuleType, NoneType

from torch import nn

from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import is_user_file, parsed_source, relative_path
from ddpcheck.record.source.source_scope import program_files

_BY_NAME = (FunctionType, ModuleType, NoneType)  # what holds variables, and no attributes or items; none: a function
_BY_ITEM = (dict, list, tuple)


def writing_line(module: nn.Module, buffer: str) -> Location | None:
    """Where a buffer of a module of the user's is updated, by that module or by a function of the program."""
    path, _, name = buffer.rpartition(".")
    kind: type = type(nn.Module.get_submodule(module, path))
    code = getattr(getattr(kind, "forward", None), "__code__", None)
    return updating_line(name, kind, own=True) if code and is_user_file(code.co_filename) else None


@functools.cache
def updating_line(path: str, holder: type, *, own: bool = False) -> Location | None:
    """Where `path` is updated, as "norm.mean" or "stats['mean']", which an object of the class `holder` holds.

    That is the line that makes the new value of the old one, else one that sets it: in a function that is no
    constructor, or in a loop. An item that no line sets is updated with what holds it. `own`: not in other classes.
    """
    names = re.findall(r"[^\W\d]\w*", path)
    found = [(score, line) for name in names[-1:] for score, line in _assignments(name, holder)]
    if not found and issubclass(holder, _BY_ITEM):
        found = [one for name in names[-2:] for kind in (object, NoneType) for one in _assignments(name, kind)]
    found = [one for one in found if one[0][0]] if own else found
    return max(found, key=lambda pair: pair[0])[1] if found else None


@functools.cache
def assignment_in_program(name: str, value: bool | None = None) -> Location | None:
    """The one line of the program that assigns an attribute or an item of this name; `None` where there are others.

    `value`: that it may assign, as far as it is spelled out.
    """
    found = {
        Location(relative_path(file), node.lineno)
        for file in program_files()
        for node in ast.walk(parsed_source(file) or ast.Module([], []))
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if _is_of(target, name) and _may_be(node.value, value)
    }
    return found.pop() if len(found) == 1 else None


def _assignments(name: str, holder: type) -> Iterator[tuple[tuple[bool, bool, bool], Location]]:
    for file in program_files():
        for node, repeats, of_class in _statements(parsed_source(file) or ast.Module([], []), repeats=False):
            if (reads := _updates(node, name, holder)) is not None:
                own = of_class in ("", *(kind.__name__ for kind in holder.__mro__))
                yield (own, reads, repeats), Location(relative_path(file), node.lineno)


def _statements(around: ast.AST, *, repeats: bool, of_class: str = "") -> Iterator[tuple[ast.stmt, bool, str]]:
    """All in `around`, whether each may run more than once, and in which class it stands."""
    if isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef):
        repeats = around.name != "__init__"
    if isinstance(around, ast.ClassDef):
        of_class = around.name
    repeats |= isinstance(around, ast.For | ast.While)
    for node in ast.iter_child_nodes(around):
        if isinstance(node, ast.stmt):
            yield node, repeats, of_class
        yield from _statements(node, repeats=repeats, of_class=of_class)


def _updates(node: ast.stmt, name: str, holder: type) -> bool | None:
    """Whether a statement makes the new value of the old one; `None` where it sets none."""
    if isinstance(node, ast.AugAssign):
        return True if _is(_base(node.target, name), name, holder) else None
    if isinstance(node, ast.Assign):
        targets = [one for target in node.targets for one in getattr(target, "elts", [target])]
        set_here = {ast.unparse(base) for target in targets if _is(base := _base(target, name), name, holder)}
        return any(ast.unparse(part) in set_here for part in ast.walk(node.value)) if set_here else None
    called = node.value if isinstance(node, ast.Expr) else None
    while isinstance(called, ast.Call) and isinstance(called.func, ast.Attribute):
        if called.func.attr.endswith("_") and _is(_base(called.func.value, name), name, holder):
            return True  # in place
        called = called.func.value
    return None


def _base(node: ast.expr, name: str) -> ast.expr:
    """What is changed where a part of it is: of "mean[:]", "mean"."""
    if isinstance(node, ast.Subscript) and not (isinstance(node.slice, ast.Constant) and node.slice.value == name):
        return node.value
    return node


def _is(node: ast.expr, name: str, holder: type) -> bool:
    if issubclass(holder, _BY_NAME):
        return isinstance(node, ast.Name) and node.id == name
    if issubclass(holder, _BY_ITEM):
        return isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value == name
    return isinstance(node, ast.Attribute) and node.attr == name


def _may_be(node: ast.expr | None, value: bool | None) -> bool:
    return value is None or not isinstance(node, ast.Constant) or node.value is value


def _is_of(target: ast.expr, name: str) -> bool:
    if isinstance(target, ast.Subscript):
        return isinstance(target.slice, ast.Constant) and target.slice.value == name
    return isinstance(target, ast.Attribute) and target.attr == name
