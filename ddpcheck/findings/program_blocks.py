"""Blocks of a program around a line: loops, branches, statements after early exits.

Queries through `ProgramSource` can be replayed on a machine without the source files.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, get_type_hints

import msgspec

from ddpcheck.findings.files import read_source
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import computed_for, file_of_class, is_user_file, parsed_source, relative_path

_Asked = ParamSpec("_Asked")
_Answer = TypeVar("_Answer")


class ProgramSource:
    """Source files of a program, or recorded answers from another machine.

    Attributes:
        answers: Answer to each query, as lists, strings and numbers.
    """

    def __init__(self, answers: Mapping[str, Any] | None = None) -> None:
        """Read local files, or replay `answers` from another machine."""
        self.answers: dict[str, Any] = dict(answers or {})
        self._is_here = answers is None

    def ask(self, question: Callable[_Asked, _Answer], *asked: _Asked.args, **named: _Asked.kwargs) -> _Answer | None:
        """Call `question` and record the answer, or return the recorded answer (or None)."""
        key = f"{question.__name__}{asked}{named or ''}"
        if not self._is_here:
            answer = self.answers.get(key)
            return None if answer is None else msgspec.convert(answer, get_type_hints(question)["return"])
        found = question(*asked, **named)
        self.answers[key] = msgspec.to_builtins(found)
        return found


ENDLESS = -1.0
_Kind = Literal["function", "loop", "branch", "rest", "try"]
_JUMPS = ast.Break | ast.Continue | ast.Return | ast.Raise


@dataclass(frozen=True, slots=True)
class Block:
    """Lines of a program that run conditionally or repeatedly."""

    # "function"; "loop"; "branch" (arm of an `if` or `match`); "rest" (statements after an `if` that may jump, as in
    # `if ...: continue`); "try" (body that a caught exception cuts short)
    kind: _Kind
    path: str  # of the file
    line: int  # of the head: `def`, `for`, `while`, `if`; of a "rest", the jump; of a "try", the `except`
    first: int  # first line; of a loop, the head, which runs repeatedly too
    last: int  # last line
    word: str = ""  # keyword of the head: "for", "if", "except"; of a "rest", of the jump
    exits: tuple[tuple[int, str], ...] = ()  # lines that end a loop, with "break" or "return"
    over: str = ""  # iterable of a `for`, or condition of a `while`
    times: float | None = None  # iterations of a loop if a literal in the program; `ENDLESS` for `while True`
    # True if the test of a "branch" or "rest" reads values computed in the loop or function around, not just counters
    varies: bool = False

    @property
    def head(self) -> str:
        """Line of the head, as "path:line"."""
        return f"{self.path}:{self.line}"


def blocks_around(file: str, shown: str, line: int) -> tuple[Block, ...]:
    """Return the blocks around a line, outermost first; `shown` is the path in reports."""
    found = [replace(one, path=shown) for one in _blocks(Path(file)) if one.first <= line <= one.last]
    return tuple(sorted(found, key=lambda one: (one.first, -one.last)))


def blocks_of_lines(
    lines: Iterable[str], files: Mapping[str, str] | None = None, source: ProgramSource | None = None
) -> dict[str, tuple[Block, ...]]:
    """Return the blocks around lines and around block heads; `files` by path in reports."""
    source = source or ProgramSource()
    found: dict[str, tuple[Block, ...]] = {}
    wanted = set(lines)
    while wanted:
        for line in wanted:
            shown, _, number = line.rpartition(":")
            found[line] = source.ask(blocks_around, (files or {}).get(shown, shown), shown, int(number)) or ()
        wanted = {block.head for line in wanted for block in found[line]} - found.keys()
    return found


def left_out_by(lines: Sequence[str], done: Sequence[str], files: Mapping[str, str]) -> list[Block]:
    """Return the blocks that may skip stack `lines` (innermost first) but not `done`.

    If the test of exactly one block varies, only this block is returned.
    """
    blocks = blocks_of_lines((*lines, *done), files)
    others = {block for line in done for block in blocks[line]}
    around = [block for line in lines for block in blocks[line] if block not in others]
    found = [block for block in around if block.kind in ("branch", "rest", "try") and block.word != "raise"]
    varying = [block for block in found if block.varies]
    return varying if len(varying) == 1 else found


def omitted_at(parameter: str, called: Mapping[str, Any]) -> Location | None:
    """Return the line that may skip a parameter, in the nearest called module's class."""
    path = parameter.split(".")
    for size in reversed(range(len(path))):
        if (holder := called.get(".".join(path[:size]))) is not None:
            return omission_of(path[size], type(holder))  # type: ignore[arg-type]
    return None


@functools.cache
def omission_of(attribute: str, kind: Any) -> Location | None:
    """Return the line that may skip `self.attribute`: a branch, early exit or conditional.

    If the test is just an argument, return the only line that computes this argument for a call.
    """
    names = [attribute]  # followed by methods that use the attribute, and their callers
    for wanted in names:
        for owner in kind.__mro__:
            tree = parsed_source(file if is_user_file(file := file_of_class(owner)) else "")
            for node in ast.walk(tree):
                methods = node.body if isinstance(node, ast.ClassDef) and node.name == owner.__name__ else []
                for method in sorted(methods, key=lambda one: getattr(one, "name", "") != "forward"):
                    name = method.name if isinstance(method, _FUNCTIONS) else "__init__"
                    for use in _uses(method, wanted) if name != "__init__" else ():
                        if line := _omitted_by(use, method, file):
                            return line
                        if name not in ("forward", *names):
                            names.append(name)
    return None


def _uses(method: ast.AST, attribute: str) -> list[ast.expr]:
    """Return reads of `self.attribute` in a method, after calls with its items."""
    nodes, names = [*ast.walk(method)], set()
    read = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr == attribute]
    read = [node for node in read if ast.unparse(node.value) == "self"]
    for node in nodes:
        match node:
            case (
                ast.For(target=target, iter=value)
                | ast.Assign(targets=[target], value=(ast.Attribute() | ast.Subscript()) as value)
            ) if any(part in read for part in ast.walk(value)):
                names |= {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
    calls = (node for node in nodes if isinstance(node, ast.Call))
    called = [one for call in calls for one in (call.func, *call.args) if isinstance(one, ast.Name)]
    return [*(one for one in called if one.id in names), *read]


def _omitted_by(use: ast.expr, method: ast.AST, file: str) -> Location | None:
    shown, nodes = relative_path(file), [*ast.walk(method)]
    blocks = left_out_by([f"{shown}:{use.lineno}"], [f"{shown}:{getattr(method, 'lineno', 0)}"], {shown: file})
    around = [node for node in nodes if use in ast.walk(node)]
    choices = [node for node in around if isinstance(node, ast.IfExp)]
    if not blocks and not choices and not any(_selects(node, use) for node in around):
        return None
    line = use.lineno if choices or not blocks else blocks[-1].line
    tests = [one.test for one in (*choices, *nodes) if isinstance(one, ast.IfExp | ast.If) and one.lineno == line]
    arguments = {one.arg for one in nodes if isinstance(one, ast.arg)}
    names = [one.id for one in tests if isinstance(one, ast.Name) and one.id in arguments]
    return Location(shown, next(filter(None, (computed_for(parsed_source(file), name) for name in names)), line))


def _selects(node: ast.AST, use: ast.expr) -> bool:
    """Check if `node` indexes `use` by a computed index, or is a filtered comprehension."""
    of_use = isinstance(node, ast.Subscript) and node.value is use and not isinstance(node.slice, ast.Constant)
    return of_use or any(one.ifs for one in getattr(node, "generators", ()))


@functools.cache
def _blocks(file: Path) -> tuple[Block, ...]:
    try:
        tree = ast.parse(read_source(file))
    except (OSError, ValueError, SyntaxError):
        return ()
    nodes = [*ast.walk(tree)]
    varying = {test for node in nodes if isinstance(node, _LOOPS | _FUNCTIONS) for test in _varying_in(node)}
    return tuple(block for node in nodes for block in _made_by(node, varying))


_LOOPS = ast.For | ast.AsyncFor | ast.While
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def _varying_in(scope: ast.AST) -> Iterator[ast.If]:
    """Yield each `if` that tests computed values or arguments, not counters or options."""
    nodes = [*ast.walk(scope)]
    counts = {node for loop in nodes for node in _counters(loop)}
    made = {ast.unparse(n) for n in nodes if isinstance(getattr(n, "ctx", None), ast.Store) and n not in counts}
    given = {node.arg for node in nodes if isinstance(node, ast.arg)} if isinstance(scope, _FUNCTIONS) else set()
    for node in nodes:
        if isinstance(node, ast.If):
            parts = [*ast.walk(node.test)]
            called = {part.func for part in parts if isinstance(part, ast.Call)}
            options = {part.value for part in parts if isinstance(part, ast.Attribute) and part not in called}
            read = [part for part in parts if isinstance(part, ast.Name | ast.Attribute)]
            if any(ast.unparse(part) in (made if part in options else made | given) for part in read):
                yield node


def _counters(node: ast.AST) -> Iterable[ast.expr]:
    """Return targets that a statement assigns a loop counter or a literal number."""
    match node:
        case ast.For(target=target, iter=ast.Call(func=ast.Name(id="range"))):
            return [target]
        case ast.For(target=ast.Tuple(elts=[number, *_]), iter=ast.Call(func=ast.Name(id="enumerate"))):
            return [number]
        case ast.AugAssign(target=target, value=ast.Constant()):
            return [target]
        case ast.Assign(targets=targets, value=ast.Constant(value=int(number))) if type(number) is int:
            return targets
    return []


def _made_by(node: ast.AST, varying: Collection[ast.If]) -> Iterator[Block]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield _block("function", "def", node.lineno, node.body)
        case ast.For() | ast.AsyncFor():
            yield _loop("for", node.lineno, node.body, ast.unparse(node.iter), _times(node.iter))
        case ast.While():
            endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
            yield _loop("while", node.lineno, node.body, ast.unparse(node.test), ENDLESS if endless else None)
        case ast.If():
            for arm in filter(None, (node.body, node.orelse)):
                yield replace(_block("branch", "if", node.lineno, arm), varies=node in varying)
        case ast.match_case():
            yield _block("branch", "case", node.pattern.lineno, node.body)
        case ast.Try():
            for handler in node.handlers:
                if not isinstance(handler.body[-1], ast.Raise):
                    yield _block("try", "except", handler.lineno, node.body)
        case ast.With(items=[ast.withitem(context_expr=ast.Call(func=called))]):
            if ast.unparse(called).rpartition(".")[2] == "suppress":
                yield _block("try", "suppress", node.lineno, node.body)
    for name in ("body", "orelse", "finalbody"):
        statements = getattr(node, name, None)
        if isinstance(statements, list):
            yield from _rests(statements, varying)


def _block(kind: _Kind, word: str, line: int, body: Sequence[ast.stmt]) -> Block:
    return Block(kind, "", line, body[0].lineno, _end(body), word)


def _loop(word: str, line: int, body: Sequence[ast.stmt], over: str, times: float | None) -> Block:
    exits = tuple(sorted(_exits(body, inner=False)))
    return Block("loop", "", line, line, _end(body), word, exits, over, times)


def _end(body: Sequence[ast.stmt]) -> int:
    return body[-1].end_lineno or body[-1].lineno


def _rests(statements: Sequence[ast.stmt], varying: Collection[ast.If]) -> Iterator[Block]:
    """Yield the statements skipped by each `if` that ends in a jump."""
    for place, one in enumerate(statements[:-1]):
        if isinstance(one, ast.If) and not one.orelse and isinstance(jump := one.body[-1], _JUMPS):
            rest = statements[place + 1 :]
            word = type(jump).__name__.lower()
            yield Block("rest", "", jump.lineno, rest[0].lineno, _end(rest), word, varies=one in varying)


def _exits(body: Sequence[ast.stmt], *, inner: bool) -> Iterator[tuple[int, str]]:
    """Yield the lines that end a loop; `inner`: `break` ends a nested loop."""
    for one in body:
        if isinstance(one, ast.Return) or (isinstance(one, ast.Break) and not inner):
            yield one.lineno, type(one).__name__.lower()
        elif not isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            loops = isinstance(one, ast.For | ast.AsyncFor | ast.While)
            for name in ("body", "orelse", "finalbody"):
                yield from _exits(getattr(one, name, []), inner=inner or (loops and name == "body"))
            for part in (*getattr(one, "handlers", ()), *getattr(one, "cases", ())):
                yield from _exits(part.body, inner=inner)


def _times(over: ast.expr) -> float | None:
    """Return the number of iterations over `range(literal)`, else None."""
    match over:
        case ast.Call(func=ast.Name(id="range"), args=[ast.Constant(value=int(count))]):
            return float(count)
    return None
