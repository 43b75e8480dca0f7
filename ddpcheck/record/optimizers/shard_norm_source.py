"""The line of a script that takes a norm of the shards of gradients, found in its source.

It is the line to change, and decides nothing: that gradients are scaled by another factor on each rank is measured.
Where no line is found, or another one, the finding is the same at the step of the optimizer, or at that line.
"""

from __future__ import annotations

import ast
from types import FrameType

from ddpcheck.findings.report import Location
from ddpcheck.record.loss.loss_source import called_in
from ddpcheck.record.source.source_scope import location_in, own_nodes, scope_of_frame, user_caller

_MOST_CALLERS = 4  # functions that lead to the step
_NORMS = ("norm", "vector_norm", "square", "pow", "get_total_norm")
_OF_SHARDS = ("to_local", "_local_tensor")
_BINDING = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For)


def shard_norm_at(frame: FrameType | None, *, plain: bool = False) -> Location | None:
    """That line in the functions that lead to `frame`, or that those call; the first one of the innermost function.

    `plain`: the shards are plain tensors, which no call makes of others.
    """
    for _ in range(_MOST_CALLERS):
        scope = None if frame is None else scope_of_frame(frame)
        if frame is None or scope is None:
            break
        for inner, _given in ((scope, {}), *called_in(scope)):
            bodies = [inner.body, *(one.body for one, _ in called_in(inner))]
            if (plain or any(_mentions(body, _OF_SHARDS) for body in bodies)) and (line := _norm_line(inner.body)):
                return location_in(inner, line)
        frame = user_caller(frame)
    return None


def _norm_line(body: ast.AST) -> int | None:
    """The first statement of a function that takes a norm of what it has made of `.grad`."""
    made: set[str] = set()
    for node in sorted((one for one in own_nodes(body) if isinstance(one, _BINDING)), key=lambda one: one.lineno):
        value = node.iter if isinstance(node, ast.For) else node.value
        if value is None or not (_mentions(value, ("grad",)) or made & _names(value)):
            continue
        if not isinstance(node, ast.For) and _takes_norm(value):
            return node.lineno
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            made |= _names(target)
    return None


def _mentions(body: ast.AST, attributes: tuple[str, ...]) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr in attributes for node in ast.walk(body))


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _takes_norm(node: ast.AST) -> bool:
    of_powers = any(isinstance(one, ast.BinOp) and isinstance(one.op, ast.Pow) for one in ast.walk(node))
    return of_powers or _mentions(node, _NORMS)
