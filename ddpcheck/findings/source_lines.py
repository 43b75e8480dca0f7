"""Find user lines: in a stack, or where a parameter or module is made.

Does not import torch.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from ddpcheck.findings import named_functions
from ddpcheck.findings.report import Location
from ddpcheck.findings.wording import LONGEST_TRACEBACK, shorten

if TYPE_CHECKING:
    from torch import nn

OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""Folder of ddpcheck."""

_REAL_OWN_FOLDER = os.path.realpath(OWN_FOLDER) + os.sep
_LIBRARY_FOLDERS = {os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib", "stdlib")}


def relative_path(path: str) -> str:
    """Return `path` relative to the working or a library folder, else the file name."""
    global _working_folder
    try:
        _working_folder = os.getcwd()
    except OSError:  # deleted by the script: use the last known folder
        pass
    return _relative_path(path, _working_folder)


_working_folder = os.sep


@functools.cache
def _relative_path(path: str, working_folder: str) -> str:
    shown = _path_in_reports(os.path.realpath(path), working_folder)
    _files.setdefault(shown, os.path.abspath(path))
    return shown


def _path_in_reports(real: str, working_folder: str) -> str:
    if real.startswith(_REAL_OWN_FOLDER):
        return Path("ddpcheck", real[len(_REAL_OWN_FOLDER) :]).as_posix()
    working_prefix = os.path.realpath(working_folder) + os.sep
    for folder in (working_prefix, *sorted(_LIBRARY_FOLDERS, key=len, reverse=True)):
        if real.startswith(folder):
            return Path(real[len(folder) :]).as_posix()
    return Path(real).name


_STDLIB = sysconfig.get_path("stdlib") + os.sep
_REAL_STDLIB = os.path.realpath(_STDLIB) + os.sep


@functools.cache
def is_user_file(name: str) -> bool:
    """Check if a source file is not part of torch, pytest, Python or ddpcheck."""
    if not name or name.startswith(("<", OWN_FOLDER)):
        return False
    parts = name.replace("\\", "/").split("/")
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return parts[parts.index(folder) + 1] not in {"torch", "cloudpickle", "_pytest", "pluggy"}
    return not name.startswith((_STDLIB, _REAL_STDLIB))


def user_location(frame: FrameType | None = None) -> Location | None:
    """Return the innermost stack line outside torch, Python and ddpcheck, or None."""
    innermost = user_frame(frame or sys._getframe(1))
    return None if innermost is None else location_of(innermost)


def step_location(frame: FrameType | None = None) -> Location | None:
    """Return the line in the configured `step-function` if it is running, else `user_location`."""
    frame = frame or sys._getframe(1)
    for caller in frames_from(frame) if named_functions.step else ():
        if named_functions.matches_name(named_functions.step, caller.f_code.co_filename, caller.f_code.co_qualname):
            return location_of(caller)
    return user_location(frame)


def user_frame(frame: FrameType | None, *, over_packages: bool | None = None) -> FrameType | None:
    """Return the innermost user frame; if `over_packages`, prefer the program to installed packages."""
    over_packages = _passes_over_packages if over_packages is None else over_packages
    innermost: FrameType | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_file(file) and not named_functions.is_wrapper(file, frame.f_code.co_qualname):
            innermost = innermost or frame
            if not (over_packages and is_installed(file)):
                return frame
        frame = frame.f_back
    return innermost


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def location_of(frame: FrameType) -> Location:
    """Return the current line of a frame."""
    return Location(relative_path(frame.f_code.co_filename), frame.f_lineno)


def lines_of_program(frame: FrameType) -> tuple[str, ...]:
    """Return the stack lines of the user's program as "path:line", innermost first."""
    lines: list[str] = []  # no generators: runs in every step
    current: FrameType | None = frame
    while current is not None and len(lines) < _MOST_LINES:
        file = current.f_code.co_filename
        if is_of_program(file) and not named_functions.is_wrapper(file, current.f_code.co_qualname):
            lines.append(_line(file, current.f_lineno))
        current = current.f_back
    return tuple(lines)


def user_line_and_program_lines(frame: FrameType) -> tuple[str, tuple[str, ...]]:
    """Return the line of `user_location` (or "") and the lines of `lines_of_program`."""
    lines = lines_of_program(frame)
    return lines[0] if lines and _passes_over_packages else str(user_location(frame) or ""), lines


def first_difference_of_stacks(lines: tuple[str, ...], others: tuple[str, ...]) -> str:
    """Return the outermost line of stack `lines` that differs from stack `others`, or ""."""
    pairs = itertools.zip_longest(lines[::-1], others[::-1], fillvalue="")
    return next((line for line, other_line in pairs if line != other_line), "")


@functools.cache
def _line(file: str, number: int) -> str:
    return f"{relative_path(file)}:{number}"


def file_of(line: str) -> str:
    """Return the absolute path for a "path:line" that `relative_path` shortened in this process."""
    return _files[line.rpartition(":")[0]]


_files: dict[str, str] = {}  # by path in reports
_MOST_LINES = 16  # of a stack


def variables_of(frame: FrameType) -> dict[str, object]:
    """Return the local variables of a frame without extending their lifetime.

    Before Python 3.13 (PEP 667), a function frame keeps the `f_locals` dictionary until the function returns, so the
    dictionary is cleared, except if a profile or trace function is set: Python then copies the items to variables.
    """
    values = frame.f_locals
    variables = dict(values)
    is_func = frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.getprofile() is sys.gettrace() is None
    if is_func and type(values) is dict and sys.getrefcount(values) <= _MOST_REFS:  # else the program refers to it
        values.clear()
    return variables


_MOST_REFS = 3  # references: the frame, `values`, and the argument of `getrefcount`


def is_called_by_a_package() -> bool:
    """Check if the innermost user frame belongs to an installed package."""
    files = (frame.f_code.co_filename for frame in frames_from(sys._getframe(1)))
    return is_installed(next(filter(is_user_file, files), ""))


_passes_over_packages = False


def pass_over_packages() -> None:
    """Prefer lines of the user's program to lines of installed packages from now on.

    Used for scripts that call a framework's trainer: their lines distinguish the barriers that the framework calls.
    """
    global _passes_over_packages
    _passes_over_packages = True


@functools.cache
def is_installed(path: str) -> bool:
    """Check if a file belongs to an installed package."""
    return not {"site-packages", "dist-packages"}.isdisjoint(path.replace("\\", "/").split("/"))


@functools.cache
def is_of_program(path: str) -> bool:
    """Check if a file belongs to the user's own program."""
    return is_user_file(path) and not is_installed(path)


def file_of_module(module: Any) -> str:
    """Return the source file of a module, or ""; does not load lazy modules."""
    file = getattr(module, "__dict__", {}).get("__file__")
    return file if isinstance(file, str) else ""


def file_of_class(kind: type) -> str:
    """Return the source file of the module of a class, or ""."""
    return file_of_module(sys.modules.get(kind.__module__))


def code_of(function: Any) -> CodeType | None:
    """Return the code object of a function or `functools.partial`, or None."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def defined_at(function: Any) -> Location | None:
    """Return the first line of a function definition with its decorators, or None."""
    code = code_of(function)
    return Location(relative_path(code.co_filename), code.co_firstlineno) if code is not None else None


def exception_location(error: BaseException) -> Location | None:
    """Return the innermost user line in a traceback, chosen as in `user_location`."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return Location(relative_path(error.filename), error.lineno)
    codes = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    codes = [(code, line) for code, line in codes if not named_functions.is_wrapper(code.co_filename, code.co_qualname)]
    lines = [(code.co_filename, line) for code, line in codes if is_user_file(code.co_filename)]
    program_lines = [(file, line) for file, line in lines if not (_passes_over_packages and is_installed(file))]
    if not lines:
        return None
    file, number = (program_lines or lines)[-1]
    return Location(relative_path(file), number)


def format_traceback(error: BaseException, *, whole: bool = False) -> str:
    """Return the traceback with relative paths; include frames of ddpcheck if `whole`."""
    hidden = () if whole else (OWN_FOLDER, "<frozen importlib")
    exception = traceback.TracebackException.from_exception(error, compact=True)
    pending: list[traceback.TracebackException | None] = [exception]
    while pending:
        current = pending.pop()
        if current is None:
            continue
        frames = [frame for frame in current.stack if not frame.filename.startswith(hidden)]
        current.stack = traceback.StackSummary.from_list(frames) if frames else None  # type: ignore[assignment]
        for frame in frames:
            frame.line  # noqa: B018 - read now: its source cannot be found under the shortened name
            frame.filename = frame.filename if frame.filename.startswith("<") else relative_path(frame.filename)
        pending += [current.__cause__, current.__context__, *(current.exceptions or ())]
    return shorten("".join(exception.format()).rstrip(), LONGEST_TRACEBACK)


def assignment_of(module: nn.Module, name: str, *, beside: object = None) -> Location | None:
    """Return the line that assigns an unregistered tensor to an attribute or global variable.

    `name` is the path from `module` to the tensor, as in `autograd_graph.unregistered_tensors`. If `module` has no
    such attribute, return the line that assigns a global variable in the file that defines function `beside`.
    """
    holder = module
    first, *path = re.split(r"[.\[]", name)
    variable = first
    while path and (inner := dict(holder._modules.items()).get(first)) is not None:
        holder, first, path = inner, path[0], path[1:]
    if hasattr(holder, first):
        return assignment_in_classes({"": _classes_of(holder)}, first)
    file = getattr(getattr(beside, "__code__", None), "co_filename", "")
    return _first_assignment(parsed_source(file).body, variable, file) if is_user_file(file) else None


def assignment_of_parameter(module: nn.Module, name: str) -> Location | None:
    """Return the line that assigns parameter or module `name`, else the nearest parent's line."""
    return assignment_in_classes(classes_of_program(module), name)


def classes_of_program(module: nn.Module) -> dict[str, tuple[tuple[str, str], ...]]:
    """Map submodule paths to (file, qualified name) of their user-defined classes."""
    all_classes = {path: _classes_of(submodule) for path, submodule in module.named_modules()}
    return {path: classes for path, classes in all_classes.items() if classes}


def _classes_of(part: nn.Module) -> tuple[tuple[str, str], ...]:
    mro_entries = [(file_of_class(kind), kind.__qualname__) for kind in type(part).__mro__]
    return tuple((file, name) for file, name in mro_entries if is_user_file(file))


def assignment_in_classes(classes: Mapping[str, Sequence[tuple[str, str]]], name: str) -> Location | None:
    """Return the line that assigns `name`, else the nearest parent module, in `classes`."""
    while name:
        holder, _, attribute = name.rpartition(".")
        for file, kind in classes.get(holder, ()):
            if location := _assignment_in_class(file, kind, attribute):
                return location
        name = holder
    return None


def _assignment_in_class(file: str, kind: str, attribute: str) -> Location | None:
    """Return the line that assigns `self.attribute` in the class with qualified name `kind`."""
    node: ast.AST | None = parsed_source(file)
    for part in kind.replace(".<locals>", "").split("."):
        if node is not None:
            definitions = (child for child in ast.walk(node) if isinstance(child, ast.ClassDef | ast.FunctionDef))
            node = next((child for child in definitions if child is not node and child.name == part), None)
    return None if node is None else _first_assignment(ast.walk(node), f"self.{attribute}", file)


def last_assignment(at: Location, name: str) -> Location | None:
    """Return the last line up to `at` that assigns `name` in the same function.

    If `name` is an attribute such as "data.classes", prefer the first line that assigns an attribute `classes` of any
    object, then the line of `argument_line` for `classes`, then the line that assigns `data`. If `name` is an argument
    of the function, return the line of `argument_line`.
    """
    tree = parsed_source(_files.get(at.path, at.path))
    first, *attributes = name.split(".")
    if attributes and (lines := [line for line, target in _targets(tree) if target.endswith(f".{attributes[-1]}")]):
        return Location(at.path, lines[0])
    if attributes and (line_number := argument_line(tree, attributes[-1])):
        return Location(at.path, line_number)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    functions = [node for node in functions if node.lineno <= at.line <= (node.end_lineno or 0)]
    for scope in (*sorted(functions, key=lambda node: -node.lineno), tree):
        if lines := [line for line, target in _targets(scope) if target == first and line <= at.line]:
            return Location(at.path, max(lines))
        arguments = () if isinstance(scope, ast.Module) else ast.walk(scope.args)
        if all(not isinstance(arg, ast.arg) or arg.arg != first for arg in arguments):
            continue
        if line_number := argument_line(tree, first):
            return Location(at.path, line_number)
        if len(lines := [line for line, target in _targets(tree) if target == first]) == 1:
            return Location(at.path, lines[0])
    return None


@functools.cache
def argument_line(tree: ast.AST, name: str) -> int | None:
    """Return the only line on which a call computes keyword argument `name`, else None."""
    plain_types = (ast.Name, ast.Attribute, ast.Constant)
    line_numbers = {
        keyword.value.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == name and not isinstance(keyword.value, plain_types)
    }
    return line_numbers.pop() if len(line_numbers) == 1 else None


def call_of(names: Sequence[str], files: Mapping[str, str]) -> Location | None:
    """Return the first line in `files` that calls a function in `names`."""
    for shown, file in files.items():
        for node in ast.walk(parsed_source(file)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in names:
                return Location(shown, node.lineno)
    return None


def exits_raised(files: Mapping[str, str]) -> tuple[Location, ...]:
    """Return the lines of `files` with `raise SystemExit`; calls of `sys.exit` are not returned."""
    locations = []
    for shown, file in files.items():
        for node in ast.walk(parsed_source(file)):
            if isinstance(node, ast.Raise) and node.exc is not None and "SystemExit" in ast.unparse(node.exc):
                locations.append(Location(shown, node.lineno))
    return tuple(locations)


@functools.cache
def _targets(tree: ast.AST) -> tuple[tuple[int, str], ...]:
    """Return (line, name) of each assignment, without class attributes and bare annotations."""
    declared = {
        target
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for stmt in node.body
        if not isinstance(stmt, ast.AugAssign)
        for target in assignment_targets(stmt)
    }
    declared |= {child.target for child in ast.walk(tree) if isinstance(child, ast.AnnAssign) and child.value is None}
    stored = (n for n in ast.walk(tree) if isinstance(n, ast.Name | ast.Attribute) and isinstance(n.ctx, ast.Store))
    return tuple((node.lineno, ast.unparse(node)) for node in stored if node not in declared)


@functools.cache
def parsed_source(file: str) -> ast.Module:
    """Return the AST of a file, or an empty AST for invalid Python."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def assignment_targets(node: ast.AST) -> list[ast.expr]:
    """Return the targets of an assignment statement or expression, else []."""
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr) else []


def _first_assignment(nodes: Iterable[ast.AST], target: str, path: str) -> Location | None:
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and target in map(ast.unparse, assignment_targets(node)):
            return Location(relative_path(path), node.lineno)
    return None
