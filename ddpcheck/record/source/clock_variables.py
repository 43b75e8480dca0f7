"""The variables of a function that are made of the time of a clock: timers, rates, meters of seconds; no metrics.

A number does not say what it was made of, so this is read from the source. It only withholds: what is found here is not
asked about, and a variable that is wrongly taken for a timer loses a finding on a metric, and makes none. One that is
not found is a number like others, and a metric only if it is just what the counts of a loop make of it.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Container, Iterator
from types import CodeType

from ddpcheck.record.source.source_scope import body_of, own_nodes

_CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "default_timer", "now")
_SEVERAL_THINGS = ast.Dict | ast.List | ast.Set | ast.Tuple


@functools.cache
def clock_variables(code: CodeType) -> frozenset[str]:
    """Their names, as "elapsed" or "self.batch_time"; without those that hold other things beside a time."""
    body, found = body_of(code), set[str]()
    pairs = [] if body is None else list(_made_of(body))
    while more := {name for name, values in pairs if name not in found and all(_has(v, found) for v in values)}:
        found |= more
    return frozenset(found)


def _made_of(body: ast.AST) -> Iterator[tuple[str, list[ast.expr]]]:
    """Each variable that is set, or whose method is called, and the values that make it so."""
    for node in own_nodes(body):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            if not isinstance(node.value, _SEVERAL_THINGS):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    yield ast.unparse(target), [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            given = [*node.args, *(one.value for one in node.keywords)]
            if values := [one for one in given if not isinstance(one, ast.Constant)]:
                yield ast.unparse(node.func.value), values


def _has(value: ast.expr, known: Container[str]) -> bool:
    """Whether a clock is read in an expression, or one of these variables."""
    return any(_reads_clock(node) or (_is_variable(node) and ast.unparse(node) in known) for node in ast.walk(value))


def _is_variable(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute)


def _reads_clock(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _CLOCKS
