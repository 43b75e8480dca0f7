"""From a parameter or a module to the line of the user's code that made it, and from a stack to the line to show.

Torch is only touched inside `record_origins`, so that everyone can use the frame helpers.
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

from ddpcheck.findings.report import Location
from ddpcheck.findings.wording import LONGEST_TRACEBACK, shortened

if TYPE_CHECKING:
    from torch import nn

OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""That of ddpcheck."""

_REAL_OWN_FOLDER = os.path.realpath(OWN_FOLDER) + os.sep
_LIBRARY_FOLDERS = tuple(
    {os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib", "stdlib")}
)


def relative_path(path: str) -> str:
    """`path` relative to the working folder, else to the folder of installed packages, else its last part."""
    global _working_folder
    try:
        _working_folder = os.getcwd()
    except OSError:  # the script has deleted it: the last one that was there
        pass
    return _relative_path(path, _working_folder)


_working_folder = os.sep


@functools.cache
def _relative_path(path: str, working_folder: str) -> str:
    shown = _shown(os.path.realpath(path), working_folder)
    _files.setdefault(shown, os.path.abspath(path))
    return shown


def _shown(real: str, working_folder: str) -> str:
    if real.startswith(_REAL_OWN_FOLDER):
        return Path("ddpcheck", real[len(_REAL_OWN_FOLDER) :]).as_posix()
    here = os.path.realpath(working_folder) + os.sep
    for folder in (here, *sorted(_LIBRARY_FOLDERS, key=len, reverse=True)):
        if real.startswith(folder):
            return Path(real[len(folder) :]).as_posix()
    return Path(real).name


_STDLIB = sysconfig.get_path("stdlib") + os.sep
_REAL_STDLIB = os.path.realpath(_STDLIB) + os.sep


@functools.cache
def is_user_file(name: str) -> bool:
    """Whether the source file `name` belongs neither to torch or pytest, nor to Python itself, nor to ddpcheck."""
    if not name or name.startswith(("<", OWN_FOLDER)):
        return False
    parts = name.replace("\\", "/").split("/")
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return parts[parts.index(folder) + 1] not in {"torch", "cloudpickle", "_pytest", "pluggy"}
    return not name.startswith((_STDLIB, _REAL_STDLIB))


def user_location(frame: FrameType | None = None) -> Location | None:
    """The innermost line on the stack that belongs neither to torch, nor to Python itself, nor to ddpcheck."""
    found = user_frame(frame or sys._getframe(1))
    return None if found is None else location_of(found)


def user_frame(frame: FrameType | None, *, over_packages: bool | None = None) -> FrameType | None:
    """The frame of the line that `user_location` gives; `over_packages`: passing over them or not, whatever it does."""
    over_packages = _passes_over_packages if over_packages is None else over_packages
    innermost: FrameType | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_file(file):
            innermost = innermost or frame
            if not (over_packages and is_installed(file)):
                return frame
        frame = frame.f_back
    return innermost


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame, and those that lead to it: from the innermost on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def location_of(frame: FrameType) -> Location:
    """The line at which a frame is."""
    return Location(relative_path(frame.f_code.co_filename), frame.f_lineno)


def lines_of_program(frame: FrameType) -> tuple[str, ...]:
    """The lines on the stack that belong to the user's own program, as "path:line", innermost first."""
    lines: list[str] = []  # no generators: this runs in each step
    current: FrameType | None = frame
    while current is not None and len(lines) < _MOST_LINES:
        file = current.f_code.co_filename
        if is_of_program(file):
            lines.append(_line(file, current.f_lineno))
        current = current.f_back
    return tuple(lines)


def line_and_lines(frame: FrameType) -> tuple[str, tuple[str, ...]]:
    """The line that `user_location` gives, "" for none, and those of `lines_of_program`; by one walk, where it can."""
    lines = lines_of_program(frame)
    return lines[0] if lines and _passes_over_packages else str(user_location(frame) or ""), lines


def below_common(lines: tuple[str, ...], others: tuple[str, ...]) -> str:
    """The line of a stack below which another one has come to another line; innermost first."""
    same = sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(lines[::-1], others[::-1], strict=False))
    )
    return lines[::-1][same] if same < len(lines) else ""


@functools.cache
def _line(file: str, number: int) -> str:
    return f"{relative_path(file)}:{number}"


def file_of(line: str) -> str:
    """The file of a line, as this process has shown it."""
    return _files[line.rpartition(":")[0]]


_files: dict[str, str] = {}  # by how they are shown
_MOST_LINES = 16  # of a stack


def variables_of(frame: FrameType) -> dict[str, object]:
    """The local variables of a frame, which are not kept alive by asking for them.

    Before Python 3.13 (PEP 667), a frame of a function keeps the dictionary that it makes of them until it returns; and
    after a call of a profile or trace function, takes its variables from there, so that it is left as it is then.
    """
    held = frame.f_locals
    variables = dict(held)
    of_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.getprofile() is sys.gettrace() is None
    if of_function and type(held) is dict and sys.getrefcount(held) <= _ONLY_THE_FRAME:  # else the program holds it too
        held.clear()
    return variables


_ONLY_THE_FRAME = 3  # references: of the frame, of `held`, and of the argument of `getrefcount`


def is_called_by_a_package() -> bool:
    """Whether the innermost frame of that kind is one of an installed package, and not of the user's program."""
    files = (frame.f_code.co_filename for frame in frames_from(sys._getframe(1)))
    return is_installed(next(filter(is_user_file, files), ""))


_passes_over_packages = False


def pass_over_packages() -> None:
    """From now on, the line of the user is that of the program, and not of a framework that it calls, if there is one.

    For a script in a trainer that somebody else wrote: two barriers of a framework are told apart by their callers.
    """
    global _passes_over_packages
    _passes_over_packages = True


@functools.cache
def is_installed(path: str) -> bool:
    """Whether a file belongs to an installed package, and so not to the user's own program."""
    return not {"site-packages", "dist-packages"}.isdisjoint(path.replace("\\", "/").split("/"))


@functools.cache
def is_of_program(path: str) -> bool:
    """Whether a file belongs to the user's own program."""
    return is_user_file(path) and not is_installed(path)


def file_of_module(module: Any) -> str:
    """The source file of a module; "" where it has none. One that is loaded when it is asked for more is not asked."""
    file = getattr(module, "__dict__", {}).get("__file__")
    return file if isinstance(file, str) else ""


def file_of_class(kind: type) -> str:
    """The source file of the module of a class; "" where it has none."""
    return file_of_module(sys.modules.get(kind.__module__))


def code_of(function: Any) -> CodeType | None:
    """The code that a function runs, or the function of a partial one; `None` for one without code."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def defined_at(function: Any) -> Location | None:
    """The line at which the definition of a function begins, with its decorators; `None` for one without code."""
    code = code_of(function)
    return Location(relative_path(code.co_filename), code.co_firstlineno) if code is not None else None


def exception_location(error: BaseException) -> Location | None:
    """The innermost line of the user's code in the traceback of `error`, by the same measure as `user_location`."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return Location(relative_path(error.filename), error.lineno)
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    lines = [(file, line) for file, line in lines if is_user_file(file)]
    own = [(file, line) for file, line in lines if not (_passes_over_packages and is_installed(file))]
    if not lines:
        return None
    file, number = (own or lines)[-1]
    return Location(relative_path(file), number)


def user_traceback(error: BaseException) -> str:
    """The traceback of `error` as text, without frames of ddpcheck, its paths relative where they can be."""
    return _formatted(error, hidden=(OWN_FOLDER, "<frozen importlib"))


def whole_traceback(error: BaseException) -> str:
    """The same with every frame."""
    return _formatted(error, hidden=())


def _formatted(error: BaseException, hidden: tuple[str, ...]) -> str:
    described = traceback.TracebackException.from_exception(error, compact=True)
    pending: list[traceback.TracebackException | None] = [described]
    while pending:
        one = pending.pop()
        if one is None:
            continue
        shown = [frame for frame in one.stack if not frame.filename.startswith(hidden)]
        one.stack = traceback.StackSummary.from_list(shown) if shown else None  # type: ignore[assignment]
        for frame in shown:
            frame.line  # noqa: B018 - read now: its source cannot be found under the shortened name
            frame.filename = frame.filename if frame.filename.startswith("<") else relative_path(frame.filename)
        pending += [one.__cause__, one.__context__, *(one.exceptions or ())]
    return shortened("".join(described.format()).rstrip(), LONGEST_TRACEBACK)


def assignment_of(module: nn.Module, name: str, *, beside: object = None) -> Location | None:
    """The line that assigns the attribute or global variable in which an unregistered tensor is found.

    Args:
        module: Whose attribute it is.
        name: The tensor's path from there, as `ddpcheck.gather.autograd.autograd_graph.unregistered_tensors` writes it.
        beside: A function among whose globals the variable is, where the module has no such attribute.
    """
    holder = module
    first, *rest = re.split(r"[.\[]", name)
    variable = first
    while rest and (inner := dict(holder._modules.items()).get(first)) is not None:
        holder, first, rest = inner, rest[0], rest[1:]
    if hasattr(holder, first):
        return assignment_in_classes({"": _classes_of(holder)}, first)
    file = getattr(getattr(beside, "__code__", None), "co_filename", "")
    return _assigned(parsed_source(file).body, variable, file) if is_user_file(file) else None


def making_of(module: nn.Module, name: str) -> Location | None:
    """The line that assigns the parameter, buffer or layer `name`, else that of the nearest module around it."""
    return assignment_in_classes(classes_of_program(module), name)


def classes_of_program(module: nn.Module) -> dict[str, tuple[tuple[str, str], ...]]:
    """By path of each part that is of a class of the user's, or of one that stems from it: file and name of these."""
    found = {path: _classes_of(part) for path, part in module.named_modules()}
    return {path: classes for path, classes in found.items() if classes}


def _classes_of(part: nn.Module) -> tuple[tuple[str, str], ...]:
    kinds = [(file_of_class(kind), kind.__qualname__) for kind in type(part).__mro__]
    return tuple((file, name) for file, name in kinds if is_user_file(file))


def assignment_in_classes(classes: Mapping[str, Sequence[tuple[str, str]]], name: str) -> Location | None:
    """As `making_of`, of a module in another process, with its `classes_of_program`."""
    while name:
        holder, _, attribute = name.rpartition(".")
        for file, kind in classes.get(holder, ()):
            if where := _assignment_in_class(file, kind, attribute):
                return where
        name = holder
    return None


def _assignment_in_class(file: str, kind: str, attribute: str) -> Location | None:
    """The assignment of `self.attribute` in the class that has the qualified name `kind`."""
    node: ast.AST | None = parsed_source(file)
    for part in kind.replace(".<locals>", "").split("."):
        if node is not None:
            definitions = (x for x in ast.walk(node) if isinstance(x, ast.ClassDef | ast.FunctionDef))
            node = next((one for one in definitions if one is not node and one.name == part), None)
    return None if node is None else _assigned(ast.walk(node), f"self.{attribute}", file)


def last_assignment(at: Location, name: str) -> Location | None:
    """The line that has last assigned the variable `name` before the line `at`, in the function that has that line.

    Of "data.classes", what assigns an attribute of that name in the file, else the variable that it begins with. Of an
    argument, or an attribute that a constructor is given, the one line that computes it for a call by that name.
    """
    tree = parsed_source(_files.get(at.path, at.path))
    first, *attributes = name.split(".")
    if attributes and (lines := [line for line, target in _targets(tree) if target.endswith(f".{attributes[-1]}")]):
        return Location(at.path, lines[0])
    if attributes and (given := computed_for(tree, attributes[-1])):
        return Location(at.path, given)
    around = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    around = [node for node in around if node.lineno <= at.line <= (node.end_lineno or 0)]
    for scope in (*sorted(around, key=lambda node: -node.lineno), tree):
        if lines := [line for line, target in _targets(scope) if target == first and line <= at.line]:
            return Location(at.path, max(lines))
        arguments = () if isinstance(scope, ast.Module) else ast.walk(scope.args)
        if all(not isinstance(one, ast.arg) or one.arg != first for one in arguments):
            continue
        if given := computed_for(tree, first):
            return Location(at.path, given)
        if len(lines := [line for line, target in _targets(tree) if target == first]) == 1:
            return Location(at.path, lines[0])
    return None


@functools.cache
def computed_for(tree: ast.AST, name: str) -> int | None:
    """The one line of a call that is given an argument by this name, and what is more than a variable or a number."""
    plain = (ast.Name, ast.Attribute, ast.Constant)
    found = {
        one.value.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for one in node.keywords
        if one.arg == name and not isinstance(one.value, plain)
    }
    return found.pop() if len(found) == 1 else None


def call_of(names: Sequence[str], files: Mapping[str, str]) -> Location | None:
    """The first line that calls a function of one of these names, in `files` (by the path that is shown)."""
    for shown, file in files.items():
        for node in ast.walk(parsed_source(file)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in names:
                return Location(shown, node.lineno)
    return None


def exits_raised(files: Mapping[str, str]) -> tuple[Location, ...]:
    """The lines of `files` that raise SystemExit; those that call `sys.exit` are known otherwise."""
    found = []
    for shown, file in files.items():
        for node in ast.walk(parsed_source(file)):
            if isinstance(node, ast.Raise) and node.exc is not None and "SystemExit" in ast.unparse(node.exc):
                found.append(Location(shown, node.lineno))
    return tuple(found)


@functools.cache
def _targets(tree: ast.AST) -> tuple[tuple[int, str], ...]:
    """What is assigned in `tree`, each name with its line; not what a class declares, of which no variable is made."""
    declared = {
        target
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for one in node.body
        if not isinstance(one, ast.AugAssign)
        for target in targets_of(one)
    }
    declared |= {one.target for one in ast.walk(tree) if isinstance(one, ast.AnnAssign) and one.value is None}
    stored = (n for n in ast.walk(tree) if isinstance(n, ast.Name | ast.Attribute) and isinstance(n.ctx, ast.Store))
    return tuple((node.lineno, ast.unparse(node)) for node in stored if node not in declared)


@functools.cache
def parsed_source(file: str) -> ast.Module:
    """The tree of a file; an empty one where it is no Python."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def targets_of(node: ast.AST) -> list[ast.expr]:
    """What a statement assigns, or an assignment in an expression does."""
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr) else []


def _assigned(nodes: Iterable[ast.AST], wanted: str, path: str) -> Location | None:
    """The line of the first of these nodes that assigns `wanted`."""
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and wanted in map(ast.unparse, targets_of(node)):
            return Location(relative_path(path), node.lineno)
    return None
