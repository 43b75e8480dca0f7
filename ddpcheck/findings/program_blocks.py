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
from ddpcheck.findings.source_lines import argument_line, file_of_class, is_user_file, parsed_source, relative_path

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class ProgramSource:
    """Answers to questions about a program's source, from its files or recorded earlier."""

    def __init__(self, answers: Mapping[str, Any] | None = None) -> None:
        self.answers: dict[str, Any] = dict(answers or {})  # by query, as lists, strings and numbers
        self._has_files = answers is None

    def ask(self, question: Callable[_Args, _Result], *asked: _Args.args, **named: _Args.kwargs) -> _Result | None:
        """Call `question` and record the answer; without source files, return a recorded answer."""
        key = f"{question.__name__}{asked}{named or ''}"
        if not self._has_files:
            answer = self.answers.get(key)
            return None if answer is None else msgspec.convert(answer, get_type_hints(question)["return"])
        result = question(*asked, **named)
        self.answers[key] = msgspec.to_builtins(result)
        return result


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
    # True if the test of a "branch" or "rest" reads values computed in the enclosing loop or function, beyond counters
    varies: bool = False

    @property
    def head(self) -> str:
        """Path and line of the block's head, as "path:line"."""
        return f"{self.path}:{self.line}"


def blocks_around(file: str, shown: str, line: int) -> tuple[Block, ...]:
    """Return the blocks around a line, outermost first; `shown` is the path in reports."""
    blocks = [replace(block, path=shown) for block in _blocks_in(Path(file)) if block.first <= line <= block.last]
    return tuple(sorted(blocks, key=lambda block: (block.first, -block.last)))


def blocks_of_lines(
    lines: Iterable[str], files: Mapping[str, str] | None = None, source: ProgramSource | None = None
) -> dict[str, tuple[Block, ...]]:
    """Return the blocks around each line, and around the head of each block."""
    source = source or ProgramSource()
    blocks_by_line: dict[str, tuple[Block, ...]] = {}
    pending = set(lines)
    while pending:
        for line in pending:
            shown, _, number = line.rpartition(":")
            blocks_by_line[line] = source.ask(blocks_around, (files or {}).get(shown, shown), shown, int(number)) or ()
        pending = {block.head for line in pending for block in blocks_by_line[line]} - blocks_by_line.keys()
    return blocks_by_line


def skipping_blocks(lines: Sequence[str], done: Sequence[str], files: Mapping[str, str]) -> list[Block]:
    """Return blocks that may make a program skip `lines` but not `done`.

    `lines` and `done` are source lines of two stacks, innermost line first. If exactly one block tests a value that
    varies (`Block.varies`), only this block is returned.
    """
    blocks = blocks_of_lines((*lines, *done), files)
    done_blocks = {block for line in done for block in blocks[line]}
    remaining = [block for line in lines for block in blocks[line] if block not in done_blocks]
    skipping = [block for block in remaining if block.kind in ("branch", "rest", "try") and block.word != "raise"]
    varying = [block for block in skipping if block.varies]
    return varying if len(varying) == 1 else skipping


def omitted_at(parameter: str, called: Mapping[str, Any]) -> Location | None:
    """Return the line that may skip `parameter`, in the nearest parent module among `called`."""
    path = parameter.split(".")
    for size in reversed(range(len(path))):
        if (holder := called.get(".".join(path[:size]))) is not None:
            return omission_of(path[size], type(holder))  # type: ignore[arg-type]
    return None


@functools.cache
def omission_of(attribute: str, kind: Any) -> Location | None:
    """Return the line that may skip `self.attribute`: a branch, early exit or conditional.

    If that line only tests an argument of the method, and exactly one line of the file computes a keyword argument of
    this name in a call, return the line of the call.
    """
    names = [attribute]  # followed by methods that use the attribute, and their callers
    for used_name in names:
        for owner in kind.__mro__:
            tree = parsed_source(file if is_user_file(file := file_of_class(owner)) else "")
            for node in ast.walk(tree):
                methods = node.body if isinstance(node, ast.ClassDef) and node.name == owner.__name__ else []
                for method in sorted(methods, key=lambda stmt: getattr(stmt, "name", "") != "forward"):
                    name = method.name if isinstance(method, _FUNCTIONS) else "__init__"
                    for use in _uses_of(method, used_name) if name != "__init__" else ():
                        if line := _line_omitting(use, method, file):
                            return line
                        if name not in ("forward", *names):
                            names.append(name)
    return None


def _uses_of(method: ast.AST, attribute: str) -> list[ast.expr]:
    """Return nodes that call or pass items of `self.attribute`, then nodes that read `self.attribute`."""
    nodes, names = [*ast.walk(method)], set()
    reads = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr == attribute]
    reads = [node for node in reads if ast.unparse(node.value) == "self"]
    for node in nodes:
        match node:
            case (
                ast.For(target=target, iter=value)
                | ast.Assign(targets=[target], value=(ast.Attribute() | ast.Subscript()) as value)
            ) if any(part in reads for part in ast.walk(value)):
                names |= {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
    calls = (node for node in nodes if isinstance(node, ast.Call))
    funcs = [func for call in calls for func in (call.func, *call.args) if isinstance(func, ast.Name)]
    return [*(func for func in funcs if func.id in names), *reads]


def _line_omitting(use: ast.expr, method: ast.AST, file: str) -> Location | None:
    shown, nodes = relative_path(file), [*ast.walk(method)]
    blocks = skipping_blocks([f"{shown}:{use.lineno}"], [f"{shown}:{getattr(method, 'lineno', 0)}"], {shown: file})
    parents = [node for node in nodes if use in ast.walk(node)]
    if_exps = [node for node in parents if isinstance(node, ast.IfExp)]
    if not blocks and not if_exps and not any(_selects_items(node, use) for node in parents):
        return None
    line = use.lineno if if_exps or not blocks else blocks[-1].line
    tests = [expr.test for expr in (*if_exps, *nodes) if isinstance(expr, ast.IfExp | ast.If) and expr.lineno == line]
    arguments = {arg.arg for arg in nodes if isinstance(arg, ast.arg)}
    names = [test.id for test in tests if isinstance(test, ast.Name) and test.id in arguments]
    return Location(shown, next(filter(None, (argument_line(parsed_source(file), name) for name in names)), line))


def _selects_items(node: ast.AST, use: ast.expr) -> bool:
    """Check if `node` indexes `use` by a computed index, or is a filtered comprehension."""
    is_indexed = isinstance(node, ast.Subscript) and node.value is use and not isinstance(node.slice, ast.Constant)
    return is_indexed or any(generator.ifs for generator in getattr(node, "generators", ()))


@functools.cache
def _blocks_in(file: Path) -> tuple[Block, ...]:
    try:
        tree = ast.parse(read_source(file))
    except (OSError, ValueError, SyntaxError):
        return ()
    nodes = [*ast.walk(tree)]
    varying = {test for node in nodes if isinstance(node, _LOOPS | _FUNCTIONS) for test in _varying_ifs(node)}
    return tuple(block for node in nodes for block in _blocks_of_node(node, varying))


_LOOPS = ast.For | ast.AsyncFor | ast.While
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def _varying_ifs(scope: ast.AST) -> Iterator[ast.If]:
    """Yield each `if` that tests computed values or arguments, not counters or options."""
    nodes = [*ast.walk(scope)]
    counters = {node for loop in nodes for node in _counter_targets(loop)}
    names = {ast.unparse(n) for n in nodes if isinstance(getattr(n, "ctx", None), ast.Store) and n not in counters}
    func_args = {node.arg for node in nodes if isinstance(node, ast.arg)} if isinstance(scope, _FUNCTIONS) else set()
    for node in nodes:
        if isinstance(node, ast.If):
            parts = [*ast.walk(node.test)]
            called = {part.func for part in parts if isinstance(part, ast.Call)}
            objects = {part.value for part in parts if isinstance(part, ast.Attribute) and part not in called}
            reads = [part for part in parts if isinstance(part, ast.Name | ast.Attribute)]
            if any(ast.unparse(part) in (names if part in objects else names | func_args) for part in reads):
                yield node


def _counter_targets(node: ast.AST) -> Iterable[ast.expr]:
    """Return the targets to which a statement assigns a loop counter or literal number."""
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


def _blocks_of_node(node: ast.AST, varying: Collection[ast.If]) -> Iterator[Block]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield _make_block("function", "def", node.lineno, node.body)
        case ast.For() | ast.AsyncFor():
            yield _make_loop("for", node.lineno, node.body, ast.unparse(node.iter), _literal_range(node.iter))
        case ast.While():
            endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
            yield _make_loop("while", node.lineno, node.body, ast.unparse(node.test), ENDLESS if endless else None)
        case ast.If():
            for arm in filter(None, (node.body, node.orelse)):
                yield replace(_make_block("branch", "if", node.lineno, arm), varies=node in varying)
        case ast.match_case():
            yield _make_block("branch", "case", node.pattern.lineno, node.body)
        case ast.Try():
            for handler in node.handlers:
                if not isinstance(handler.body[-1], ast.Raise):
                    yield _make_block("try", "except", handler.lineno, node.body)
        case ast.With(items=[ast.withitem(context_expr=ast.Call(func=called))]):
            if ast.unparse(called).rpartition(".")[2] == "suppress":
                yield _make_block("try", "suppress", node.lineno, node.body)
    for name in ("body", "orelse", "finalbody"):
        statements = getattr(node, name, None)
        if isinstance(statements, list):
            yield from _skippable_rests(statements, varying)


def _make_block(kind: _Kind, word: str, line: int, body: Sequence[ast.stmt]) -> Block:
    return Block(kind, "", line, body[0].lineno, _last_line(body), word)


def _make_loop(word: str, line: int, body: Sequence[ast.stmt], over: str, times: float | None) -> Block:
    exits = tuple(sorted(_exit_lines(body, inner=False)))
    return Block("loop", "", line, line, _last_line(body), word, exits, over, times)


def _last_line(body: Sequence[ast.stmt]) -> int:
    return body[-1].end_lineno or body[-1].lineno


def _skippable_rests(statements: Sequence[ast.stmt], varying: Collection[ast.If]) -> Iterator[Block]:
    """Yield the statements that each `if` skips by a jump such as `continue`."""
    for index, stmt in enumerate(statements[:-1]):
        if isinstance(stmt, ast.If) and not stmt.orelse and isinstance(jump := stmt.body[-1], _JUMPS):
            skipped = statements[index + 1 :]
            word = type(jump).__name__.lower()
            yield Block("rest", "", jump.lineno, skipped[0].lineno, _last_line(skipped), word, varies=stmt in varying)


def _exit_lines(body: Sequence[ast.stmt], *, inner: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, keyword) of statements that leave a loop; if `inner`, ignore `break`."""
    for stmt in body:
        if isinstance(stmt, ast.Return) or (isinstance(stmt, ast.Break) and not inner):
            yield stmt.lineno, type(stmt).__name__.lower()
        elif not isinstance(stmt, _FUNCTIONS | ast.ClassDef):
            is_loop = isinstance(stmt, _LOOPS)
            for name in ("body", "orelse", "finalbody"):
                yield from _exit_lines(getattr(stmt, name, []), inner=inner or (is_loop and name == "body"))
            for clause in (*getattr(stmt, "handlers", ()), *getattr(stmt, "cases", ())):
                yield from _exit_lines(clause.body, inner=inner)


def _literal_range(over: ast.expr) -> float | None:
    match over:
        case ast.Call(func=ast.Name(id="range"), args=[ast.Constant(value=int(count))]):
            return float(count)
    return None
