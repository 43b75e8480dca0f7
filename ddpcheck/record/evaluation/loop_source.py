"""Source analysis of the current line: end of the loop, enclosing conditions."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Mapping
from types import CodeType
from typing import Any

from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import parsed_source, relative_path, targets_of, variables_of
from ddpcheck.record.source import program_numbers
from ddpcheck.record.source.source_scope import body_of, own_nodes


def numbers_of_conditions() -> list[float]:
    """Return the non-integer numbers in the conditions of the enclosing `if` statements."""
    numbers: list[float] = []
    for frame in itertools.islice(program_numbers.program_frames(), 3):
        variables = {**frame.f_globals, **variables_of(frame)}
        for test in _tests_around(frame.f_code.co_filename, frame.f_lineno):
            for node in ast.walk(test):
                if isinstance(node, ast.Name | ast.Attribute) and (number := _value_of(node, variables)) is not None:
                    numbers.append(number)
    return [number for number in numbers if number != int(number)]


def _value_of(node: ast.expr, variables: Mapping[str, Any]) -> float | None:
    """Return the current number of a name or an object's attribute, or None."""
    if isinstance(node, ast.Name):
        return program_numbers.number_of(variables.get(node.id))
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return program_numbers.number_of((getattr(variables.get(node.value.id), "__dict__", None) or {}).get(node.attr))
    return None


def lines_of_value() -> dict[str, Location]:
    """Return, by function on the stack, the line of the passed value's assignment."""
    lines: dict[str, Location] = {}
    for frame in itertools.islice(program_numbers.program_frames(), 4):
        path, line = relative_path(frame.f_code.co_filename), _line_of_value(frame.f_code, frame.f_lineno)
        lines.setdefault(frame.f_code.co_name, Location(path, line))
    return lines


@functools.cache
def _line_of_value(code: CodeType, line: int) -> int:
    body = body_of(code)
    nodes = list(own_nodes(body)) if body is not None else []
    calls = (node for node in nodes if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or 0))
    names = {argument.id for call in calls for argument in call.args[:1] if isinstance(argument, ast.Name)}
    targets = (target for node in nodes for target in targets_of(node) if isinstance(target, ast.Name))
    assigned = (target.lineno for target in targets if target.id in names and target.lineno < line)
    return max(assigned, default=line)


def lines_after() -> dict[str, Location]:
    """Return, by function on the stack, the line after the enclosing loop."""
    lines: dict[str, Location] = {}
    for frame in program_numbers.program_frames():
        code = frame.f_code
        line = _line_after(code.co_filename, frame.f_lineno)
        if line and code.co_name not in lines:
            lines[code.co_name] = Location(relative_path(code.co_filename), line)
    return lines


@functools.cache
def _line_after(file: str, line: int) -> int:
    """Return the line after the innermost `for` that begins at `line`, or 0."""
    for node in ast.walk(parsed_source(file)):
        for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            for stmt, following in itertools.pairwise(body if isinstance(body, list) else []):
                if isinstance(stmt, ast.For) and stmt.lineno <= line <= (stmt.iter.end_lineno or stmt.lineno):
                    return int(following.lineno)
                if isinstance(stmt, ast.With) and stmt.body and isinstance(last := stmt.body[-1], ast.For):
                    if last.lineno <= line <= (last.iter.end_lineno or last.lineno):
                        return int(following.lineno)
    return 0


@functools.cache
def _tests_around(file: str, line: int) -> tuple[ast.expr, ...]:
    around = [node for node in ast.walk(parsed_source(file)) if isinstance(node, ast.If)]
    return tuple(
        node.test for node in around if node.body[0].lineno <= line <= (node.body[-1].end_lineno or node.lineno)
    )
