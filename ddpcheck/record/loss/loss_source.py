"""Source analysis of the loss: lines of its reduction and world size scaling.

The loss is followed from the call of backward through names, arithmetic and the script's own functions. The current
value of a name decides whether it is a loss or a number. Source analysis never creates a finding: it only locates the
line to edit, and the origin of a measured factor.
"""

from __future__ import annotations

import ast
import functools
import itertools
import types
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, TypeGuard

import torch
from torch import nn

from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import assignment_targets, parsed_source, relative_path
from ddpcheck.gather.autograd.autograd_graph import node_of
from ddpcheck.record.source.source_scope import (
    UNKNOWN,
    Place,
    Scope,
    bindings,
    body_of,
    function_of,
    is_program_code,
    location_in,
    node_position,
    own_nodes,
    parameter_names,
    resolve_node,
    returns,
    scope_of_function,
    scopes_from,
    statement_at,
)

_DEEPEST = 24  # max nesting of names, operations and functions
_ITEM_COUNT = "num_items_in_batch"  # argument that the Trainer of transformers passes to compute_loss
_WORLD_SIZE = "world_size"  # keyword of init_process_group, and part of the name get_world_size


@dataclass(frozen=True, slots=True)
class LossSource:
    """Source lines that compute a loss and scale the loss by the world size."""

    made: Location | None = None  # line that computes the loss, or reduces it to a scalar
    scaled: Location | None = None  # line that scales the loss by the world size, or None


@dataclass(slots=True)
class _Trace:
    made: Location | None = None
    factors: list[tuple[Scope, ast.expr, int]] = field(default_factory=list)
    steps: int = 0


def loss_source(frame: FrameType | None) -> LossSource:
    """Return the lines of the loss whose backward is called in `frame`."""
    trace = _Trace()
    for scope, caller in scopes_from(frame):
        if _trace_statement(trace, scope, statement_at(scope.body, caller)) is None:
            break
    scaled = (location_in(scope, line) for scope, factor, line in trace.factors if is_world_size(scope, factor, set()))
    return LossSource(trace.made, next(scaled, None))


def _trace_statement(trace: _Trace, scope: Scope, statement: ast.stmt | None) -> str | None:
    """Trace a loss to its origin; return the argument name if passed by callers."""
    if statement is None:
        return None
    losses = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and _is_loss(scope.value(node.id))]
    loss: ast.expr | None = losses[0] if losses else None
    call = _backward_call(statement)
    if call is not None and isinstance(call.func, ast.Attribute):
        loss = (call.args[0] if call.args else call.func.value) if loss is None or not call.args else call.args[0]
        loss = _without_scaler(scope, loss)
    if loss is None:
        return None
    _trace_expr(trace, scope, loss, node_position(statement), None)
    if trace.made is None and isinstance(loss, ast.Name) and loss.id in parameter_names(scope.body):
        return loss.id
    trace.made = trace.made or location_in(scope, loss.lineno)
    return None


def _without_scaler(scope: Scope, loss: ast.expr) -> ast.expr:
    """Return the argument of `scaler.scale(loss)` and similar calls, else `loss`."""
    if isinstance(loss, ast.Call) and isinstance(loss.func, ast.Attribute) and len(loss.args) == 1:
        if isinstance(loss.args[0], ast.Name) and _is_loss(scope.value(loss.args[0].id)):
            return loss.args[0]
        if not isinstance(resolve_node(scope, loss.func.value), nn.Module) and isinstance(loss.args[0], ast.BinOp):
            return loss.args[0]
    return loss


def _backward_call(statement: ast.AST) -> ast.Call | None:
    calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call))
    return next((c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "backward"), None)


def _is_loss(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and node_of(value) is not None and value.numel() == 1


# Following the source


def _trace_expr(trace: _Trace, scope: Scope, node: ast.expr, before: Place, part: int | str | None) -> bool:
    """Find the line that computes `node`, or its item `part`; return True if found."""
    trace.steps += 1
    if trace.steps > _DEEPEST or trace.made is not None:
        return trace.made is not None
    if isinstance(node, ast.Name):
        return _trace_name(trace, scope, node.id, min(before, node_position(node)), part)
    if isinstance(node, ast.BinOp):
        return _trace_operation(trace, scope, node, before)
    if isinstance(node, ast.UnaryOp | ast.Await | ast.NamedExpr):
        return _trace_expr(trace, scope, node.operand if isinstance(node, ast.UnaryOp) else node.value, before, part)
    if isinstance(node, ast.IfExp):
        return _trace_expr(trace, scope, node.body, before, part) or _trace_expr(
            trace, scope, node.orelse, before, part
        )
    if isinstance(node, ast.Tuple) and isinstance(part, int) and part < len(node.elts):
        return _trace_expr(trace, scope, node.elts[part], before, None)
    if isinstance(node, ast.Dict) and part is not None:
        values = {k.value: v for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant)}
        return part in values and _trace_expr(trace, scope, values[part], before, None)
    if isinstance(node, ast.Attribute):
        return _trace_expr(trace, scope, node.value, before, node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        key = node.slice.value
        return _trace_expr(trace, scope, node.value, before, key if isinstance(key, int | str) else None)
    if isinstance(node, ast.Call):
        return _trace_call(trace, scope, node, before, part)
    return False


def _trace_name(trace: _Trace, scope: Scope, name: str, before: Place, part: int | str | None) -> bool:
    """Trace variable `name` to its last assignment; record factors of later `*=` and `/=`."""
    for pos, target, value in sorted(bindings(scope.body, name), key=lambda binding: binding[0], reverse=True):
        if pos >= before:
            continue
        if isinstance(target, ast.AugAssign):
            if isinstance(target.op, ast.Mult | ast.Div):
                trace.factors.append((scope, target.value, pos[0]))
                continue
            if _trace_expr(trace, scope, ast.Name(name, lineno=pos[0], col_offset=pos[1]), pos, part):
                return True
            return _trace_expr(trace, scope, target.value, pos, None)
        if isinstance(target, int):
            part = target
        if _is_constant(scope, value):  # initial value of a sum of losses
            continue
        if not _trace_expr(trace, scope, value, pos, part):
            trace.made = location_in(scope, value.lineno)
        return True
    return False


def _is_constant(scope: Scope, node: ast.expr) -> bool:
    """Return True for a constant, or a library call on constants: `torch.zeros(1, device=device)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        is_in_module = isinstance(resolve_node(scope, node.func.value), types.ModuleType)
        is_library = is_in_module and function_of(resolve_node(scope, node.func))[0] is None
        return is_library and all(isinstance(argument, ast.Constant) for argument in node.args)
    return isinstance(node, ast.Constant)


def _trace_operation(trace: _Trace, scope: Scope, node: ast.BinOp, before: Place) -> bool:
    if isinstance(node.op, ast.Mult | ast.Div):
        scales_right = _is_number(scope, node.left) or _has_loss(scope, node.right)
        scales_left = _is_number(scope, node.right) or _has_loss(scope, node.left)
        if scales_left and scales_right:  # both or neither contain a loss
            scales_left = scales_right = False
        if isinstance(node.op, ast.Div) or scales_left:
            trace.factors.append((scope, node.right, node.lineno))
            if isinstance(node.op, ast.Div) and not _is_number(scope, node.right):
                return _note_origin(trace, scope, node)  # division by a count, for example: the mean of a sum
            return _trace_expr(trace, scope, node.left, before, None) or _note_origin(trace, scope, node.left)
        if scales_right:
            trace.factors.append((scope, node.left, node.lineno))
            return _trace_expr(trace, scope, node.right, before, None) or _note_origin(trace, scope, node.right)
    if isinstance(node.op, ast.Mult | ast.Div | ast.Add | ast.Sub):
        return _trace_expr(trace, scope, node.left, before, None) or _trace_expr(trace, scope, node.right, before, None)
    return _note_origin(trace, scope, node)


def _note_origin(trace: _Trace, scope: Scope, node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        return False
    trace.made = trace.made or location_in(scope, node.lineno)
    return True


def _has_loss(scope: Scope, node: ast.expr) -> bool:
    return any(isinstance(child, ast.Name) and _is_loss(scope.value(child.id)) for child in ast.walk(node))


def _is_number(scope: Scope, node: ast.expr) -> bool:
    """Return True if an operand is known to be a number, not a loss."""
    if _has_loss(scope, node):
        return False
    if isinstance(node, ast.Name):
        value = scope.value(node.id)
        return value is not UNKNOWN and not isinstance(value, torch.Tensor)
    if isinstance(node, ast.Call):
        called = resolve_node(scope, node.func)
        is_library = isinstance(called, types.FunctionType) and not is_program_code(called.__code__)
        return is_library or any(called is builtin for builtin in (int, float, len))
    if isinstance(node, ast.Attribute):
        return isinstance(resolve_node(scope, node), int | float)
    if isinstance(node, ast.BinOp):
        return _is_number(scope, node.left) and _is_number(scope, node.right)
    return isinstance(node, ast.Constant)


def _trace_call(trace: _Trace, scope: Scope, call: ast.Call, before: Place, part: int | str | None) -> bool:
    """Trace calls of script functions, casts and copies; other calls compute the loss."""
    called = resolve_node(scope, call.func)
    is_library = function_of(called)[0] is None
    if is_library and isinstance(call.func, ast.Attribute) and not call.args and not call.keywords:
        if isinstance(call.func.value, ast.Name) and call.func.attr not in ("mean", "sum"):  # a cast or copy
            return _trace_name(trace, scope, call.func.value.id, before, part)
    inner = scope_of_function(called)
    if inner is None:
        arguments = {keyword.arg: keyword.value for keyword in call.keywords}
        if isinstance(part, str) and part in arguments:  # a container constructed here
            return _trace_expr(trace, scope, arguments[part], before, None)
        return _note_origin(trace, scope, call)
    results = reversed(list(returns(inner.body)))
    followed = any(_trace_expr(trace, inner, result, (result.lineno + 1, 0), part) for result in results)
    return followed or _note_origin(trace, scope, call)


# The world size


def is_world_size(scope: Scope, node: ast.expr, seen: set[Any]) -> bool:
    """Return True if `node` is computed from the world size; `seen`: names already checked."""
    return any(_is_world_size_node(scope, child, seen) for child in ast.walk(node))


@functools.cache
def uncounted_at(code: CodeType) -> Location | None:
    """Return where a loss function is defined, if it ignores its argument `num_items_in_batch`."""
    body = body_of(code)
    if body is None or _ITEM_COUNT not in parameter_names(body):
        return None
    reads = any(isinstance(node, ast.Name) and node.id == _ITEM_COUNT for node in ast.walk(body))
    return None if reads else Location(relative_path(code.co_filename), code.co_firstlineno)


def gradients_scaled_at(frame: FrameType | None) -> Location | None:
    """Return the line that scales `.grad` by the world size, or None."""
    for scope, _ in scopes_from(frame):
        for inner, arguments in ((scope, {}), *called_in(scope)):
            for node in ast.walk(inner.body):
                if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr) and ".grad" in ast.unparse(node):
                    factors = [factor for child in ast.walk(node) for factor in _factors(child)]
                    passed = [arguments[name] for factor in factors if (name := ast.unparse(factor)) in arguments]
                    candidates = [*((inner, factor) for factor in factors), *((scope, factor) for factor in passed)]
                    if any(is_world_size(factor_scope, factor, set()) for factor_scope, factor in candidates):
                        return location_in(inner, node.lineno)
    return None


def gradients_changed_at(frame: FrameType | None) -> Location | None:
    """Return the line that writes `.grad` between backward and optimizer step (None unless unique).

    Searches the functions on the stack of the step, and the functions called between backward and the step.
    """
    for scope, active_frame in scopes_from(frame):
        calls = (node for node in own_nodes(scope.body) if isinstance(node, ast.Expr) and _backward_call(node))
        begins = max((node.lineno for node in calls if node.lineno < active_frame.f_lineno), default=0)
        between = range(begins + 1, active_frame.f_lineno)
        direct = [(scope, node) for node in own_nodes(scope.body) if getattr(node, "lineno", 0) in between]
        indirect = [(callee, node) for callee, _ in called_in(scope, between) for node in ast.walk(callee.body)]
        lines = {location_in(owner, node.lineno) for owner, node in (*direct, *indirect) if _writes_gradients(node)}
        if lines or begins:
            return lines.pop() if len(lines) == 1 else None
    return None


def _writes_gradients(node: ast.AST) -> TypeGuard[ast.stmt]:
    if isinstance(node, ast.Assign | ast.AugAssign):
        written = itertools.chain.from_iterable(map(ast.walk, assignment_targets(node)))
        return any(isinstance(target, ast.Attribute) and target.attr == "grad" for target in written)
    if not isinstance(node, ast.Expr) or not isinstance(call := node.value, ast.Call):
        return False
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    in_place = name.endswith("_") and not name.endswith("__") and ".grad" in ast.unparse(call)
    return name == "zero_grad" or in_place


def called_in(scope: Scope, lines: Container[int] | None = None) -> Iterator[tuple[Scope, dict[str, ast.expr]]]:
    """Yield script functions called in `scope` (on `lines`), with argument expressions by name."""
    for node in ast.walk(scope.body):
        if isinstance(node, ast.Call) and (lines is None or node.lineno in lines):
            called = resolve_node(scope, node.func)
            if (inner := scope_of_function(called)) is not None and (code := function_of(called)[0]) is not None:
                names = code.co_varnames[: code.co_argcount]
                by_keyword = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
                yield inner, {**dict(zip(names, node.args, strict=False)), **by_keyword}


def _factors(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv):
        return [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr.strip("_").removeprefix("foreach_")
        return node.args if name in ("mul", "div", "multiply", "divide") else []
    return []


def _is_world_size_node(scope: Scope, node: ast.AST, seen: set[Any]) -> bool:
    if isinstance(node, ast.Constant):
        return bool(node.value == _WORLD_SIZE.upper())  # environment variable
    if isinstance(node, ast.Call):
        called = resolve_node(scope, node.func)
        if called is not UNKNOWN and getattr(called, "__name__", "") == f"get_{_WORLD_SIZE}":
            return True
        return any(is_world_size(inner, expr, seen) for inner, expr in _returned_values(called, None, seen))
    if not isinstance(node, ast.Name | ast.Attribute):
        return False
    if isinstance(node, ast.Attribute):
        library = type(resolve_node(scope, node.value)).__module__.partition(".")[0]
        if library in ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning"):
            return node.attr in ("num_processes", _WORLD_SIZE)
    text, tree = ast.unparse(node), parsed_source(scope.file)
    if (scope.body, text) in seen:
        return False
    seen.add((scope.body, text))
    if text in _world_size_arguments(tree):
        return True
    for body in (scope.body, tree):
        for _, target, value in bindings(body, text):
            if not isinstance(target, int):
                results: list[tuple[Scope, ast.expr]] = [(scope, value)]
            elif isinstance(value, ast.Tuple):
                results = [(scope, value.elts[target])] if target < len(value.elts) else []
            else:
                called = resolve_node(scope, value.func) if isinstance(value, ast.Call) else UNKNOWN
                results = list(_returned_values(called, target, seen))
            if any(is_world_size(owner, expr, seen) for owner, expr in results):
                return True
    return False


def _returned_values(called: Any, part: int | None, seen: set[Any]) -> Iterator[tuple[Scope, ast.expr]]:
    """Yield expressions that a script function returns (item `part` of tuples, if given)."""
    inner = scope_of_function(called)
    if inner is None or (inner.body, part) in seen:
        return
    seen.add((inner.body, part))
    for expr in returns(inner.body):
        if part is None:
            yield inner, expr
        elif isinstance(expr, ast.Tuple) and part < len(expr.elts):
            yield inner, expr.elts[part]


@functools.cache
def _world_size_arguments(tree: ast.Module) -> frozenset[str]:
    """Return the expressions passed as `world_size` or `num_replicas` in a file."""
    keywords = (keyword for node in ast.walk(tree) if isinstance(node, ast.Call) for keyword in node.keywords)
    values = (keyword.value for keyword in keywords if keyword.arg in (_WORLD_SIZE, "num_replicas"))
    return frozenset(ast.unparse(expr) for expr in values if isinstance(expr, ast.Name | ast.Attribute))
