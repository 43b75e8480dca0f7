"""Analyze the source of a script: scopes, assignments, results, and values of names.

Code of the script is never run: a value that cannot be looked up is unknown. Also find the line of a program that
assigns an attribute, or updates a variable from its old value. The line is shown as the line to change, and decides
nothing: differences between ranks, and changes, are measured. Without a line, or with a wrong line, the finding stays
the same, at the place of detection or at the wrong line.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType, NoneType
from typing import Any

from torch import nn

from ddpcheck.findings.program_blocks import skipping_blocks
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import (
    assignment_targets,
    file_of,
    file_of_module,
    frames_from,
    is_of_program,
    is_user_file,
    parsed_source,
    relative_path,
    variables_of,
)

UNKNOWN: Any = object()


@dataclass(slots=True)
class Scope:
    """Function, or top level of a file, in which names are looked up."""

    file: str
    body: ast.AST
    names: Mapping[str, Any]  # local variables; empty if the function is not running
    outer: Mapping[str, Any]  # global variables

    def value(self, name: str) -> Any:
        return self.names.get(name, self.outer.get(name, UNKNOWN))


def function_of(called: Any) -> tuple[CodeType | None, Mapping[str, Any]]:
    """Return (code, globals) of the script function that `called()` runs, or (None, {})."""
    while isinstance(called, nn.Module):
        mods = dict(called._modules.items())  # not a dict in a scripted module
        inner = mods.get("_orig_mod") if mods.get("module") is None else mods["module"]  # truth would call `__len__`
        forward = inspect.getattr_static(type(called), "forward")  # reading it from a scripted class raises
        wraps = not is_program_code(getattr(forward, "__code__", None))
        called = inner if wraps and inner is not None else forward
    called = getattr(called, "func", called) if isinstance(called, functools.partial) else called
    called = inspect.unwrap(called) if isinstance(called, types.FunctionType) else called
    called = getattr(called, "__func__", called)
    if not isinstance(called, types.FunctionType):  # a callable object
        called = inspect.getattr_static(type(called), "__call__", None)
    code = getattr(called, "__code__", None)
    return (code, called.__globals__) if isinstance(code, CodeType) and is_program_code(code) else (None, {})


def scope_of_function(called: Any) -> Scope | None:
    """Return the scope of the script function that `called()` runs, or `None` without source."""
    code, outer = function_of(called)
    body = None if code is None else body_of(code)
    return None if code is None or body is None else Scope(code.co_filename, body, {}, outer)


def is_program_code(code: Any) -> bool:
    """Return True if `code` is from a file of the program, not a package."""
    return isinstance(code, CodeType) and is_of_program(code.co_filename)


def resolve_node(scope: Scope, node: ast.expr) -> Any:
    """Return the value of a name or attribute without running script code, else UNKNOWN."""
    if isinstance(node, ast.Name):
        return scope.value(node.id)
    if isinstance(node, ast.Attribute) and (owner := resolve_node(scope, node.value)) is not UNKNOWN:
        if isinstance(owner, nn.Module) and node.attr in owner._modules:
            return owner._modules[node.attr]
        value = inspect.getattr_static(owner, node.attr, UNKNOWN)
        return value.__func__ if isinstance(value, staticmethod | classmethod) else value
    return UNKNOWN


Place = tuple[int, int]  # (line, column); a line may contain several statements

Binding = tuple[Place, "int | ast.AugAssign | None", ast.expr]
"""(position, index into an unpacked value or in-place statement or None, value)"""


def node_position(node: ast.expr | ast.stmt) -> Place:
    """Return the position of the first character of a node."""
    return node.lineno, node.col_offset


def bindings(body: ast.AST, name: str) -> Iterator[Binding]:
    """Yield the assignments to a name, or to an attribute like "self.x"."""
    for node in own_nodes(body):
        if isinstance(node, ast.AugAssign):
            if ast.unparse(node.target) == name:
                yield node_position(node), node, node.value
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            for target in assignment_targets(node):
                if isinstance(target, ast.Tuple | ast.List):
                    for index, element in enumerate(target.elts):
                        if ast.unparse(element) == name:
                            yield node_position(node), index, node.value
                elif ast.unparse(target) == name:
                    yield node_position(node), None, node.value


def own_nodes(body: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function or file, without nested functions and classes."""
    pending = list(ast.iter_child_nodes(body))
    for node in pending:  # grows in the loop
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            pending += ast.iter_child_nodes(node)


def returns(body: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that a function returns."""
    if isinstance(body, ast.Lambda):
        yield body.body
    yield from (node.value for node in own_nodes(body) if isinstance(node, ast.Return) and node.value is not None)


def parameter_names(body: ast.AST) -> set[str]:
    if not isinstance(body, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return set()
    return {arg.arg for arg in (*body.args.posonlyargs, *body.args.args, *body.args.kwonlyargs)}


def statement_at(body: ast.AST, frame: FrameType) -> ast.stmt | None:
    """Return the innermost statement that a frame is running; `body` is the frame's tree."""
    line, _, column, _ = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    pos = (frame.f_lineno, column or 0) if line == frame.f_lineno else (frame.f_lineno, 1 << 16)
    statements = [
        n
        for n in own_nodes(body)
        if isinstance(n, ast.stmt) and node_position(n) <= pos and pos[0] <= (n.end_lineno or 0)
    ]
    return max(statements, key=node_position, default=None)


@functools.cache
def body_of(code: CodeType) -> ast.AST | None:
    """Return the syntax tree of a function or of a file's top level."""
    tree = parsed_source(code.co_filename)
    if code.co_name == "<module>":
        return tree if tree.body else None
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    for node in ast.walk(tree):
        if isinstance(node, kinds):
            decorators = [decorator.lineno for decorator in getattr(node, "decorator_list", ())]
            name = getattr(node, "name", "<lambda>")
            if name == code.co_name and min([node.lineno, *decorators]) == code.co_firstlineno:
                return node
    return None


def scope_of_frame(frame: FrameType) -> Scope | None:
    """Return the scope of a running function; `None` without source."""
    body = body_of(frame.f_code)
    return None if body is None else Scope(frame.f_code.co_filename, body, variables_of(frame), frame.f_globals)


def user_caller(frame: FrameType) -> FrameType | None:
    """Return the nearest script frame that called this frame."""
    return next((caller for caller in frames_from(frame.f_back) if is_program_code(caller.f_code)), None)


@functools.cache
def skipping_lines(step: tuple[str, ...], backward: tuple[str, ...]) -> tuple[Location, ...]:
    """Return lines that may skip an optimizer step after backward, given both calls' stacks."""
    files = {line.rpartition(":")[0]: file_of(line) for line in (*step, *backward)}
    return tuple(Location(block.path, block.line) for block in skipping_blocks(step, backward, files))


MOST_CALLERS = 4  # script functions followed up the call stack


def scopes_from(frame: FrameType | None) -> Iterator[tuple[Scope, FrameType]]:
    """Yield (scope, frame) for `frame` and its script callers, until a source is missing."""
    for _ in range(MOST_CALLERS):
        scope = None if frame is None else scope_of_frame(frame)
        if frame is None or scope is None:
            return
        yield scope, frame
        frame = user_caller(frame)


def location_in(scope: Scope, line: int) -> Location:
    return Location(relative_path(scope.file), line)


def program_files() -> tuple[str, ...]:
    """Return the imported source files of the program."""
    return _program_files(len(sys.modules))  # a new key after each import


@functools.lru_cache(1)
def _program_files(_modules: int) -> tuple[str, ...]:
    files = map(file_of_module, list(sys.modules.values()))
    return tuple(file for file in files if file.endswith(".py") and is_of_program(file))


def _files_with(name: str) -> Iterator[str]:
    """Yield the program files whose text contains `name`; parsing all files would be slow."""
    wanted = re.compile(rf"\b{re.escape(name)}\b".encode())
    return (file for file in program_files() if wanted.search(_text_of(file)))


def _text_of(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError:  # e.g. in a zip archive
        return b""


@functools.cache
def names_searched_by_index(file: str) -> frozenset[str]:
    """Return the names in a file on which `.index(...)` is called."""
    return frozenset(name.decode() for name in _INDEX_CALLS.findall(_text_of(file)))


_INDEX_CALLS = re.compile(rb"(\w+)\s*\.\s*index\s*\(")
_BY_NAME = (FunctionType, ModuleType, NoneType)  # hold variables, not attributes or items; `NoneType`: a function
_BY_ITEM = (dict, list, tuple)


def writing_line(module: nn.Module, buffer: str) -> Location | None:
    """Return the line that updates a buffer of a user's module."""
    path, _, name = buffer.rpartition(".")
    kind: type = type(nn.Module.get_submodule(module, path))
    code = getattr(getattr(kind, "forward", None), "__code__", None)
    return updating_line(name, kind, own=True) if code and is_user_file(code.co_filename) else None


@functools.cache
def updating_line(path: str, holder: type, *, own: bool = False) -> Location | None:
    """Return the line that updates `path` ("norm.mean", "stats['mean']") of a `holder` object.

    Prefers lines in the class `holder` or outside of classes, then lines that compute the new value from the old value,
    then lines that may run repeatedly (in a loop, or in a function except the constructor). `own`: exclude lines in
    other classes. If no line sets an item, returns the line that updates the container of the item.
    """
    names = re.findall(r"[^\W\d]\w*", path)
    entries = [(score, line) for name in names[-1:] for score, line in _assignments(name, holder)]
    if not entries and issubclass(holder, _BY_ITEM):
        entries = [entry for name in names[-2:] for kind in (object, NoneType) for entry in _assignments(name, kind)]
    entries = [entry for entry in entries if entry[0][0]] if own else entries
    return max(entries, key=lambda pair: pair[0])[1] if entries else None


@functools.cache
def assignment_in_program(name: str, value: bool | None = None) -> Location | None:
    """Return the only program line that assigns the attribute or item `name`, or `None`.

    `value`: ignore lines that assign a constant different from `value`.
    """
    locations = {
        Location(relative_path(file), node.lineno)
        for file in _files_with(name)
        for node in ast.walk(parsed_source(file))
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for target in assignment_targets(node)
        if _refers_to(target, name, dict) or _refers_to(target, name, object)
        if value is None or not isinstance(node.value, ast.Constant) or node.value.value is value
    }
    return locations.pop() if len(locations) == 1 else None


def _assignments(name: str, holder: type) -> Iterator[tuple[tuple[bool, bool, bool], Location]]:
    for file in _files_with(name):
        for node, repeats, of_class in _statements(parsed_source(file), repeats=False):
            if (reads := _is_update(node, name, holder)) is not None:
                is_own = of_class in ("", *(kind.__name__ for kind in holder.__mro__))
                yield (is_own, reads, repeats), Location(relative_path(file), node.lineno)


def _statements(tree: ast.AST, *, repeats: bool, of_class: str = "") -> Iterator[tuple[ast.stmt, bool, str]]:
    """Yield (statement, True if the statement may run repeatedly, name of the enclosing class)."""
    if isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef):
        repeats = tree.name != "__init__"
    if isinstance(tree, ast.ClassDef):
        of_class = tree.name
    repeats |= isinstance(tree, ast.For | ast.While)
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node, repeats, of_class
        yield from _statements(node, repeats=repeats, of_class=of_class)


def _is_update(node: ast.stmt, name: str, holder: type) -> bool | None:
    """Return True if `node` updates `name`, False if `node` overwrites it, else `None`."""
    if isinstance(node, ast.AugAssign):
        return True if _refers_to(_object_of(node.target, name), name, holder) else None
    if isinstance(node, ast.Assign):
        targets = [element for target in node.targets for element in getattr(target, "elts", [target])]
        bases = {ast.unparse(base) for target in targets if _refers_to(base := _object_of(target, name), name, holder)}
        return any(ast.unparse(part) in bases for part in ast.walk(node.value)) if bases else None
    call = node.value if isinstance(node, ast.Expr) else None
    while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        if call.func.attr.endswith("_") and _refers_to(_object_of(call.func.value, name), name, holder):
            return True  # in place
        call = call.func.value
    return None


def _object_of(node: ast.expr, name: str) -> ast.expr:
    """Return the object that an assignment changes: "mean" for "mean[:]"."""
    if isinstance(node, ast.Subscript) and not (isinstance(node.slice, ast.Constant) and node.slice.value == name):
        return node.value
    return node


def _refers_to(node: ast.expr, name: str, holder: type) -> bool:
    if issubclass(holder, _BY_NAME):
        return isinstance(node, ast.Name) and node.id == name
    if issubclass(holder, _BY_ITEM):
        return isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value == name
    return isinstance(node, ast.Attribute) and node.attr == name
