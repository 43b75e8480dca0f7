"""The source of functions of a script: their scopes, assignments and results, and what their names hold.

Nothing of the script's is run: what cannot be looked up is not known.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from torch import nn

from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import is_installed, is_user_file, parsed_source, relative_path, variables_of

UNKNOWN: Any = object()


@dataclass(slots=True)
class Scope:
    """A function, or the top of a file, in which names are looked up."""

    file: str
    body: ast.AST
    names: Mapping[str, Any]  # the local variables, as far as it runs now
    outer: Mapping[str, Any]  # global ones

    def value(self, name: str) -> Any:
        return self.names.get(name, self.outer.get(name, UNKNOWN))


def function_of(called: Any) -> tuple[CodeType | None, Mapping[str, Any]]:
    """The code of the script that a call runs, and its global variables."""
    while isinstance(called, nn.Module):
        held = dict(called._modules.items())  # of a scripted module, it is no dict
        inner = held.get("_orig_mod") if held.get("module") is None else held["module"]  # some have a length, or none
        forward = inspect.getattr_static(type(called), "forward")  # that of a scripted class raises where it is read
        wraps = not is_users(getattr(forward, "__code__", None))
        called = inner if wraps and inner is not None else forward
    called = getattr(called, "func", called) if isinstance(called, functools.partial) else called
    called = inspect.unwrap(called) if isinstance(called, types.FunctionType) else called
    called = getattr(called, "__func__", called)
    code = getattr(called, "__code__", None)
    return (code, called.__globals__) if isinstance(code, CodeType) and is_users(code) else (None, {})


def is_users(code: Any) -> bool:
    """Whether this is code of the script's own files."""
    return isinstance(code, CodeType) and is_user_file(code.co_filename) and not is_installed(code.co_filename)


def resolved(scope: Scope, node: ast.expr) -> Any:
    """What an expression of names and attributes holds, without running code of the script's."""
    if isinstance(node, ast.Name):
        return scope.value(node.id)
    if isinstance(node, ast.Attribute) and (owner := resolved(scope, node.value)) is not UNKNOWN:
        if isinstance(owner, nn.Module) and node.attr in owner._modules:
            return owner._modules[node.attr]
        found = inspect.getattr_static(owner, node.attr, UNKNOWN)
        return found.__func__ if isinstance(found, staticmethod | classmethod) else found
    return UNKNOWN


Place = tuple[int, int]
"""A line, and a column in it: several statements may stand in a line."""

Binding = tuple[Place, "int | ast.AugAssign | None", ast.expr]
"""A place, which part of the value is assigned there or what is done in place, and the value."""


def place_of(node: ast.expr | ast.stmt) -> Place:
    """Where it begins."""
    return node.lineno, node.col_offset


def bindings(body: ast.AST, name: str) -> Iterator[Binding]:
    """The assignments to a name, or to an attribute that is spelled so."""
    for node in own_nodes(body):
        if isinstance(node, ast.AugAssign):
            if ast.unparse(node.target) == name:
                yield place_of(node), node, node.value
        elif isinstance(node, ast.NamedExpr):
            if node.target.id == name:
                yield place_of(node), None, node.value
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Tuple | ast.List):
                    for index, one in enumerate(target.elts):
                        if ast.unparse(one) == name:
                            yield place_of(node), index, node.value
                elif ast.unparse(target) == name:
                    yield place_of(node), None, node.value


def own_nodes(body: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions in it; of a file, all of its top."""
    pending = list(ast.iter_child_nodes(body))
    for node in pending:  # which grows
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            pending += ast.iter_child_nodes(node)


def returns(body: ast.AST) -> Iterator[ast.expr]:
    """What a function returns, by its statements."""
    if isinstance(body, ast.Lambda):
        yield body.body
    yield from (node.value for node in own_nodes(body) if isinstance(node, ast.Return) and node.value is not None)


def parameters_of(body: ast.AST) -> set[str]:
    """The names of the parameters of a function."""
    if not isinstance(body, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return set()
    return {one.arg for one in (*body.args.posonlyargs, *body.args.args, *body.args.kwonlyargs)}


def statement_at(body: ast.AST, frame: FrameType) -> ast.stmt | None:
    """The innermost statement of a function that runs, of which `body` is the tree, at which it is now."""
    line, _, column, _ = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    at = (frame.f_lineno, column or 0) if line == frame.f_lineno else (frame.f_lineno, 1 << 16)
    found = [
        n for n in own_nodes(body) if isinstance(n, ast.stmt) and place_of(n) <= at and at[0] <= (n.end_lineno or 0)
    ]
    return max(found, key=place_of, default=None)


@functools.cache
def body_of(code: CodeType) -> ast.AST | None:
    """The tree of a function, or of the top of a file."""
    tree: ast.AST | None = parsed_source(code.co_filename)
    if tree is None or code.co_name == "<module>":
        return tree
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    for node in ast.walk(tree):
        if isinstance(node, kinds):
            decorators = [one.lineno for one in getattr(node, "decorator_list", ())]
            name = getattr(node, "name", "<lambda>")
            if name == code.co_name and min([node.lineno, *decorators]) == code.co_firstlineno:
                return node
    return None


def scope_of_frame(frame: FrameType) -> Scope | None:
    """The scope of a function that runs; `None` where its source is not there."""
    body = body_of(frame.f_code)
    if body is None:
        return None
    return Scope(frame.f_code.co_filename, body, variables_of(frame), frame.f_globals)


def user_caller(frame: FrameType) -> FrameType | None:
    """The function of the script by which that of a frame was called."""
    caller = frame.f_back
    while caller is not None and not is_users(caller.f_code):
        caller = caller.f_back
    return caller


def location_in(scope: Scope, line: int) -> Location:
    """A line of the file of a scope."""
    return Location(relative_path(scope.file), line)


def program_files() -> tuple[str, ...]:
    """The source files of the program that have been imported."""
    return _program_files(len(sys.modules))  # which grows when one is imported


@functools.lru_cache(1)
def _program_files(_modules: int) -> tuple[str, ...]:
    files = (getattr(module, "__file__", None) or "" for module in list(sys.modules.values()))
    return tuple(file for file in files if file.endswith(".py") and is_user_file(file) and not is_installed(file))
