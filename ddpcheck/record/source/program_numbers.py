"""Numbers in script functions: counters, sums, meters, predictions, labels; lines near the running line."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import math
import sys
from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import (
    assignment_targets,
    file_of_class,
    file_of_module,
    frames_from,
    is_of_program,
    parsed_source,
    relative_path,
    user_location,
    variables_of,
)
from ddpcheck.gather.autograd.autograd_graph import MODULE_INTERNALS
from ddpcheck.record.source.source_scope import body_of, own_nodes

_CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "default_timer", "now")
_CONTAINER_NODES = ast.Dict | ast.List | ast.Set | ast.Tuple


@functools.cache
def clock_variables(code: CodeType) -> frozenset[str]:
    """Return the variables of a function that hold only times, e.g. "self.batch_time"."""
    body, clocks = body_of(code), set[str]()
    pairs = [] if body is None else list(_values_of_variables(body))
    while new := {name for name, values in pairs if name not in clocks and all(_has_time(v, clocks) for v in values)}:
        clocks |= new
    return frozenset(clocks)


def _values_of_variables(body: ast.AST) -> Iterator[tuple[str, list[ast.expr]]]:
    """Yield (variable, expressions that are assigned to it or passed to its methods)."""
    for node in own_nodes(body):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            if not isinstance(node.value, _CONTAINER_NODES):
                for target in assignment_targets(node):
                    yield ast.unparse(target), [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            args = [*node.args, *(keyword.value for keyword in node.keywords)]
            if values := [arg for arg in args if not isinstance(arg, ast.Constant)]:
                yield ast.unparse(node.func.value), values


def _has_time(value: ast.expr, known: Container[str]) -> bool:
    """Return True if an expression reads a clock or a `known` variable."""
    calls = (node for node in ast.walk(value) if isinstance(node, ast.Call))
    if any(ast.unparse(call.func).rpartition(".")[2] in _CLOCKS for call in calls):
        return True
    return any(isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in known for node in ast.walk(value))


_MOST_FRAMES = 6
_MOST_NUMBERS = 256
_MOST_OBJECTS = 1024
_MOST_ITEMS = 4096  # items of a list
_MOST_ROWS = 1 << 14
_MOST_IN_ARRAY = _MOST_ROWS << 10
_MOST_ELEMENTS = 1 << 22  # elements of a forward input
_MOST_COLUMNS = 8
_FEW_COUNTS = 3
_MOST_LISTS = 6  # lists of rows
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int32, torch.int64)
_DEEPEST = 4  # e.g. a meter in a dictionary of a logger
_MOST_PARTS = 16  # items of a list or tuple that are searched


def numbers_of_program() -> dict[str, float]:
    """Return numbers in program variables, and sums of lists ("train.loss", "train.sum(losses)")."""
    numbers: dict[str, float] = {}
    for name, value in program_contents():
        number = number_of(value)
        if number is None and isinstance(value, list | tuple | deque):
            number = _sum_of(value)
            function, _, variable = name.partition(".")
            name = f"{function}.sum({variable})"
        if number is not None:
            numbers.setdefault(name, number)
        if len(numbers) >= _MOST_NUMBERS:
            break
    return numbers


def counters_of_program() -> dict[str, torch.Tensor]:
    """Return small tensors, arrays and lists of numbers in program variables ("train.counts")."""
    counters: dict[str, torch.Tensor] = {}
    for name, value in program_contents():
        if name not in counters and (numbers := _few_numbers(value)) is not None:
            counters[name] = numbers
        if len(counters) >= _MOST_NUMBERS:
            break
    return counters


def parts_of_counter(name: str, numbers: torch.Tensor, samples: int) -> dict[str, float]:
    """Return the numbers that a script may compute from a counter: items, sum, trace.

    Items of more than three integers (sample counts by class) are left out, unless an item equals `samples`.
    """
    function, _, variable = name.partition(".")
    parts = {}
    total = bool((numbers == samples).any())
    if not total or numbers.dim() > 1:
        parts[f"{function}.sum({variable})"] = float(numbers.sum())
    is_few = len(numbers) <= _FEW_COUNTS or total or bool((numbers != numbers.round()).any())
    if numbers.dim() == 1 and len(numbers) <= _MOST_COLUMNS and is_few:
        parts |= {f"{name}[{index}]": number for index, number in enumerate(numbers.tolist())}
    if numbers.dim() == 2 and numbers.shape[0] == numbers.shape[1]:
        parts[f"{function}.trace({variable})"] = float(numbers.trace())
    return {part: number for part, number in parts.items() if math.isfinite(number)}


def _few_numbers(value: Any) -> torch.Tensor | None:
    if type(value) is list and 1 < len(value) <= _MOST_COLUMNS:
        numbers = [number_of(item) for item in value]
        return torch.tensor(numbers, dtype=torch.float64) if None not in numbers else None
    array = array_of(value)
    if array is None or not 1 < array.numel() <= _MOST_ITEMS or array.dtype == torch.bool:
        return None
    return array.cpu().double()


def array_of(value: Any, kinds: str = "iuf") -> torch.Tensor | None:
    """Return a tensor of numbers, or a numeric array as a tensor; otherwise `None`.

    A read-only array, or an array of a dtype that torch lacks, is copied: torch would warn, or raise. Since such an
    array may map a file of any size, large arrays give `None`. `kinds`: accepted letters of `dtype.kind`.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in kinds:
        if value.size > _MOST_IN_ARRAY:
            return None
        kind = value.dtype.newbyteorder("=") if value.dtype.itemsize <= 8 else numpy.float64
        value = torch.from_numpy(numpy.ascontiguousarray(numpy.require(value, kind, "W")))
    plain = type(value) is torch.Tensor and value.layout == torch.strided and value.device.type != "meta"
    return value.detach() if plain and not value.is_complex() else None


def tensor_of(value: Any) -> torch.Tensor | None:
    """Return a number, array, tensor or short list as a tensor; `None` if unusable."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(type(value), numpy.ndarray | numpy.floating):
        plain = value.dtype.kind == "f" and value.dtype.itemsize in (4, 8) and 0 < value.size <= _MOST_ELEMENTS
        kind = f"f{value.dtype.itemsize}"  # native byte order
        return torch.from_numpy(numpy.array(value, kind, order="C")) if plain else None
    if type(value) in (float, int):
        return torch.tensor(float(value), dtype=torch.float64) if abs(value) < 1e300 else None
    if type(value) is list and 1 < len(value) <= _MOST_NUMBERS and {*map(type, value)} == {float}:
        return torch.tensor(value, dtype=torch.float64)
    return value if issubclass(type(value), torch.Tensor) and is_usable(value) and not value.requires_grad else None


def is_usable(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` is plain, strided, not meta, and small enough to read."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided and tensor.dtype in _DTYPES
    return plain and tensor.device.type != "meta" and 0 < tensor.numel() <= _MOST_ELEMENTS


def labels_of_program(count: int) -> dict[str, torch.Tensor]:
    """Return the labels of `count` samples, by program variable ("evaluate.rows[0]")."""
    labels: dict[str, torch.Tensor] = {}
    for name, value in program_contents():
        columns = {f"{name}[{index}]": column for index, column in enumerate(columns_of(value, count))}
        for part, column in (columns or {name: value}).items():
            rows = labels_in(column, count)
            is_number = part != name and rows is not None and len(rows.unique()) == count  # index of the sample
            if part not in labels and rows is not None and not is_number:
                labels[part] = rows
        if len(labels) >= _MOST_LISTS:
            break
    return labels


def number_of(value: Any) -> float | None:
    """Return a finite number of Python, numpy or torch as a float, else `None`."""
    number = _plain_number(value)
    return number if number is not None and math.isfinite(number) else None


def _plain_number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if not isinstance(value, int) or value.bit_length() < 1000 else None
    if type(value) in (torch.Tensor, nn.Parameter):
        plain = value.numel() == 1 and value.layout == torch.strided and value.device.type != "meta"
        return float(value.detach()) if plain and not value.is_complex() and value.dtype != torch.bool else None
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.number | numpy.ndarray) and value.size == 1:
        return float(value) if value.ndim == 0 and value.dtype.kind in "iuf" else None
    return None


def labels_in(value: Any, count: int) -> torch.Tensor | None:
    """Return the labels of `count` samples in a tensor, array or list, or `None`."""
    if count < 1 or count > _MOST_ROWS:
        return None
    if isinstance(value, list | tuple | deque) and 0 < len(value) <= count:
        items = list(value)
        if all(type(item) is int for item in items):
            return torch.tensor(items) if len(items) == count else None
        parts = [_label_rows(item) for item in items]
        kept = [part for part in parts if part is not None]
        return torch.cat(kept) if len(kept) == len(parts) and sum(map(len, kept)) == count else None
    rows = _label_rows(value)
    return rows if rows is not None and len(rows) == count else None


def _label_rows(value: Any) -> torch.Tensor | None:
    array = array_of(value)
    if array is None or array.dim() not in (1, 2) or not array.numel() or len(array) > _MOST_ROWS:
        return None
    rows = array[:, 0] if array.dim() == 2 and array.shape[1] == 1 else array
    if rows.dim() == 1:
        return rows.cpu().long() if not rows.is_floating_point() and rows.dtype != torch.bool else None
    return rows.argmax(1).cpu() if rows.is_floating_point() else None


def columns_of(value: Any, count: int) -> list[Any]:
    """Return the columns of a table with `count` rows, e.g. predictions and labels."""
    if not 1 < count <= _MOST_ROWS:
        return []
    if (table := array_of(value)) is not None:
        if table.dim() != 2 or len(table) != count or not 1 < table.shape[1] <= _MOST_COLUMNS:
            return []
        columns = list(table.cpu().unbind(1))
        are_whole = [not c.is_floating_point() or bool((c == c.round()).all()) for c in columns]
        return [c.long() if is_whole else c for c, is_whole in zip(columns, are_whole, strict=True)] * any(are_whole)
    if type(value) not in (list, tuple) or len(value) != count or type(value[0]) not in (list, tuple, dict):
        return []
    first = value[0]
    are_equal = (type(row) is type(first) and len(row) == len(first) for row in value)
    if not 1 < len(first) <= _MOST_COLUMNS or not all(are_equal):
        return []
    keys = first if isinstance(first, dict) else range(len(first))
    if isinstance(first, dict) and any(row.keys() != first.keys() for row in value):
        return []
    lists = [[_plain_number(row[key]) for row in value] for key in keys]
    return [_whole_numbers(numbers) for numbers in lists if None not in numbers]


def _whole_numbers(numbers: list[Any]) -> list[Any]:
    are_whole = all(math.isfinite(number) and number == int(number) for number in numbers)
    return list(map(int, numbers)) if are_whole else list(map(float, numbers))


def _sum_of(items: Any) -> float | None:
    if not items or len(items) > _MOST_ITEMS:
        return None
    numbers = [number_of(item) for item in items]
    if all(number is not None for number in numbers):
        return math.fsum(number for number in numbers if number is not None)
    rows = [item for item in items if type(item) is torch.Tensor and item.dim() == 1 and item.is_floating_point()]
    if len(rows) == len(items) and sum(map(len, rows)) <= _MOST_ROWS and all(r.device.type != "meta" for r in rows):
        return math.fsum(float(row.detach().double().sum()) for row in rows)
    return None


def program_contents(*, wide: bool = False, without: Collection[int] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) pairs of variables of running program functions, their attributes and items.

    The innermost function comes first, and variables that hold times are skipped. `wide`: also search lists, modules,
    classes and closures. The outermost function then comes first: an object that several functions hold is named for
    the outermost of these functions. `without`: `id()` of objects whose contents are not searched.
    """
    seen = set(without)
    limit = _MOST_OBJECTS + len(seen)
    frames = list(itertools.islice(program_frames(), _MOST_FRAMES))
    for frame in reversed(frames) if wide else frames:
        function, times = frame.f_code.co_name, clock_variables(frame.f_code)
        variables = variables_of(frame) if function != "<module>" else dict(frame.f_globals)
        if wide:
            variables = {**frame.f_globals, **variables}
        pending = deque((f"{function}.{name}", value, 0) for name, value in variables.items() if name[:2] != "__")
        while pending and len(seen) < limit:
            name, value, depth = pending.popleft()
            if name[len(function) + 1 :] in times:
                continue
            try:
                value.__class__  # noqa: B018 - raises for a weak proxy of a deleted object
            except Exception:
                continue
            yield name, value
            if depth < _DEEPEST and id(value) not in seen:
                items: list[tuple[str, Any]] = []
                with contextlib.suppress(Exception):  # attribute access may raise
                    items = (_wide_items(name, value) if wide else []) or items_with_paths(name, value)
                if items:
                    seen.add(id(value))
                    pending.extend((path, item, depth + 1) for path, item in items)


def items_with_paths(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return (path, item) pairs of a mapping ("a['b']") or a program object ("a.b")."""
    kind = type(value)  # `__class__` of a proxy may run code
    if issubclass(kind, Mapping) and kind.__module__ in ("builtins", "collections"):
        items = itertools.islice(value.items(), _MOST_NUMBERS)
        return [(f"{name}[{key!r}]", item) for key, item in items if isinstance(key, str | int)]
    if issubclass(kind, nn.Module | type) or not is_of_program(file_of_class(kind)):
        return []
    attrs = dict(getattr(value, "__dict__", None) or {})
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        attrs |= {key: getattr(value, key) for key in slots if isinstance(slots, tuple) and hasattr(value, key)}
    return [(f"{name}.{key}", item) for key, item in attrs.items()]


def _wide_items(name: str, value: Any) -> list[tuple[str, Any]]:
    kind = type(value)
    attrs: dict[str, Any] = {}
    if kind in (list, tuple):
        return [(f"{name}[{number}]", item) for number, item in enumerate(value[:_MOST_PARTS])]
    if kind is MethodType:
        return [(f"{name}.__self__", value.__self__)]
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        attrs = dict(zip(kind._fields, value, strict=False))
    elif kind is FunctionType and is_of_program(value.__code__.co_filename):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        attrs = {key: cell.cell_contents for key, cell in cells if cell != _EMPTY_CELL} | vars(value)
    elif issubclass(kind, ModuleType | type | nn.Module):
        module_name = vars(value if issubclass(kind, type) else kind).get("__module__")
        module = value if kind is ModuleType else sys.modules.get(str(module_name))
        if is_of_program(file_of_module(module)):
            attrs = {key: item for key, item in vars(value).items() if key not in MODULE_INTERNALS}
            attrs |= vars(value).get("_buffers", {})
    return [(f"{name}.{key}", item) for key, item in attrs.items() if isinstance(key, str) and key[:2] != "__"]


_EMPTY_CELL = CellType()  # equals only empty closure cells


def program_frames() -> Iterator[FrameType]:
    """Return the frames of the program on the stack, innermost first."""
    return (frame for frame in frames_from(sys._getframe(1)) if is_of_program(frame.f_code.co_filename))


def line_of_output() -> Location | None:
    """Return the program line that prints, not a line in a function named `print`."""
    return user_location(next((frame for frame in program_frames() if frame.f_code.co_name != "print"), None))


def numbers_printed_as(text: str, numbers: Iterable[float]) -> tuple[float, ...]:
    """Return the `numbers` that, after rounding, are printed as `text`, plain or in percent."""
    if "e" in text:
        return tuple(value for value in numbers if abs(value - float(text)) < 1e-3 * abs(value))
    places = len(text.partition(".")[2])
    return tuple(value for value in numbers if text in (f"{value:.{places}f}", f"{100 * value:.{places}f}"))


def numbers_of_conditions() -> list[float]:
    """Return the non-integer numbers on which the `if` statements around the running lines depend."""
    numbers: list[float] = []
    for frame in itertools.islice(program_frames(), 3):
        variables = {**frame.f_globals, **variables_of(frame)}
        for test in _enclosing_tests(frame.f_code.co_filename, frame.f_lineno):
            for node in ast.walk(test):
                if isinstance(node, ast.Name | ast.Attribute) and (number := _value_of(node, variables)) is not None:
                    numbers.append(number)
    return [number for number in numbers if number != int(number)]


def _value_of(node: ast.expr, variables: Mapping[str, Any]) -> float | None:
    if isinstance(node, ast.Name):
        return number_of(variables.get(node.id))
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return number_of((getattr(variables.get(node.value.id), "__dict__", None) or {}).get(node.attr))
    return None


def lines_of_value() -> dict[str, Location]:
    """Return, for each function on the stack, where its call's first argument was assigned."""
    lines: dict[str, Location] = {}
    for frame in itertools.islice(program_frames(), 4):
        path, line = relative_path(frame.f_code.co_filename), _line_of_value(frame.f_code, frame.f_lineno)
        lines.setdefault(frame.f_code.co_name, Location(path, line))
    return lines


@functools.cache
def _line_of_value(code: CodeType, line: int) -> int:
    body = body_of(code)
    nodes = list(own_nodes(body)) if body is not None else []
    calls = (node for node in nodes if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or 0))
    names = {argument.id for call in calls for argument in call.args[:1] if isinstance(argument, ast.Name)}
    targets = (target for node in nodes for target in assignment_targets(node) if isinstance(target, ast.Name))
    assigned = (target.lineno for target in targets if target.id in names and target.lineno < line)
    return max(assigned, default=line)


def lines_after() -> dict[str, Location]:
    """Return, for functions on the stack, the line after the `for` whose header runs."""
    lines: dict[str, Location] = {}
    for frame in program_frames():
        code = frame.f_code
        line = _line_after(code.co_filename, frame.f_lineno)
        if line and code.co_name not in lines:
            lines[code.co_name] = Location(relative_path(code.co_filename), line)
    return lines


@functools.cache
def _line_after(file: str, line: int) -> int:
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
def _enclosing_tests(file: str, line: int) -> tuple[ast.expr, ...]:
    statements = [node for node in ast.walk(parsed_source(file)) if isinstance(node, ast.If)]
    return tuple(n.test for n in statements if n.body[0].lineno <= line <= (n.body[-1].end_lineno or n.lineno))
