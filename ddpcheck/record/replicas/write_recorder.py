"""Record lines where a script writes wrapped parameters outside of optimizer steps."""

from __future__ import annotations

import ast
import functools
import itertools
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import nn

from ddpcheck.findings.evidence.loop import OF_A_COPY, ModuleChanged
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import is_of_program, is_user_file, location_of, parsed_source, user_frame
from ddpcheck.gather.patching import Patch, Recorder, guarded
from ddpcheck.gather.state.tensor_file import tensor_ref
from ddpcheck.record.loop.wrapper_checks import is_ignored
from ddpcheck.record.rank.environment import when_imported
from ddpcheck.record.rank.script_watch import ScriptWatch
from ddpcheck.record.recording import Recording

_MOST_LINES = 64  # lines of the script
_MOST_TIMES = 256  # checks per line, which a loop may reach once per parameter
_OPERATORS = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__")
_NO_VALUES = frozenset({"requires_grad_", "detach_", "rename_", "share_memory_", "retain_grad"})
_IGNORED = ".data ="
_NOT_WATCHED = -2  # wrapper number before the first forward pass of a sharded module
_Key = tuple[int, Location]  # (wrapper number, line)


class WriteRecorder(Recorder, subjects=("parameters", "replicas")):
    """Recorder of in-place methods and `.data` of parameters and shards."""

    def __init__(self, run: Recording) -> None:
        self.stepping = False  # True during an optimizer step, which may write parameters. Set by `step`.
        self._run = run
        self._wrapped: dict[int, tuple[Callable[[], Any], int, str]] = {}  # (parameter, wrapper, name), by `id()`
        self._lines: dict[tuple[Any, int], int] = {}  # number of checks, by code and line
        self.seen: dict[_Key, ModuleChanged] = {}  # writes since the start of the last step, by wrapper and line
        self._told: set[_Key] = set()
        self._early: dict[Location, list[tuple[Callable[[], Any], str]]] = {}  # (parameter, method), by line
        self._patches: dict[tuple[Any, str], Patch] = {}  # by class and method
        self._of_steps: dict[tuple[Any, str], Patch] = {}  # patches of methods that optimizers call
        self._follow(nn.Parameter)
        follow = guarded(self._follow)
        when_imported(("torch.distributed.tensor",), lambda home: follow(vars(home).get("DTensor")))

    def _follow(self, kind: Any) -> None:
        if kind is None:  # torch 2.4 defines DTensor elsewhere
            return
        for name in dir(torch.Tensor):
            if name in _OPERATORS or (name.endswith("_") and not name.startswith("_") and name not in _NO_VALUES):
                self._patches[kind, name] = Patch(kind, name, functools.partial(self._followed, kind, name))
        Patch(kind, "data", self._followed_data)

    def step(self, *, begins: bool) -> None:
        """Begin or end an optimizer step; undo patches of called methods meanwhile."""
        if begins is self.stepping:  # a step has raised, or is nested
            return
        self.stepping = begins
        for patch in self._of_steps.values():
            (patch.undo if begins else patch.redo)()

    def sharded(self, shard: torch.Tensor) -> None:
        """Follow a shard whose module is watched from the first forward pass on."""
        self._wrapped[id(shard)] = tensor_ref(shard), _NOT_WATCHED, ""

    def wrapped(self, watch: ScriptWatch) -> None:
        """Follow the parameters of a new wrapper, and report earlier writes."""
        for name, parameter in watch.module_parameters():  # frozen parameters, too
            self._wrapped[id(parameter)] = tensor_ref(parameter), watch.number, name
        name_of = {id(parameter): name for name, parameter in watch.module_parameters()}
        for location, writes in self._early.items():
            ops = {name_of[id(part)]: op for ref, op in writes if (part := ref()) is not None and id(part) in name_of}
            if ops:
                self._run.add(ModuleChanged(watch.number, "written", next(iter(ops.values())), (*ops,), location))

    def copied(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Follow parameters of a copy of a wrapped module, perhaps wrapped itself."""
        for tensor in tensors:
            entry = self._wrapped.get(id(tensor))
            if entry is None or entry[0]() is not tensor or entry[1] != OF_A_COPY:
                self._wrapped[id(tensor)] = tensor_ref(tensor), OF_A_COPY, name

    def write(self) -> None:
        """Write recorded lines to the log, before a step or at the end."""
        if self.seen:
            for key, change in self.seen.items():
                if key not in self._told:
                    self._told.add(key)
                    self._run.add(change)
            self.seen.clear()

    def _followed(self, kind: Any, name: str, original: Any) -> Any:
        note, wrapped = guarded(self._written), self._wrapped

        @functools.wraps(original)
        def method(*arguments: Any, **named: Any) -> Any:
            if self.stepping:
                self._of_steps[kind, name] = self._patches[kind, name]
                return original(*arguments, **named)
            result = original(*arguments, **named)
            if id(arguments[0]) in wrapped:
                note(name, arguments[0])
            return result

        return method

    def _followed_data(self, original: Any) -> Any:
        note, wrapped = guarded(self._written), self._wrapped

        def get(parameter: Any) -> Any:
            if id(parameter) in wrapped and not self.stepping:
                note("", parameter)
            return original.__get__(parameter)

        def put(parameter: Any, value: Any) -> None:
            original.__set__(parameter, value)
            if id(parameter) in wrapped and not self.stepping:
                note(_IGNORED if is_ignored(parameter, value) else ".data", parameter)

        return property(get, put)

    def _written(self, how: str, parameter: Any) -> None:
        """Record a write, an ignored write (`_IGNORED`), or a read of `.data` (empty `how`)."""
        param_ref, number, name = self._wrapped[id(parameter)]
        caller = sys._getframe(_CALLER)
        line = caller.f_code, caller.f_lineno
        count = self._lines.get(line, 0)
        if count >= _MOST_TIMES or (not count and len(self._lines) >= _MOST_LINES) or param_ref() is not parameter:
            return
        self._lines[line] = count + 1
        if not how and not (how := _method_on_data(caller)):
            return
        if how == _IGNORED and not is_user_file(caller.f_code.co_filename):
            return
        frame = user_frame(caller)
        if frame is None:
            return
        location = location_of(frame)
        if number == _NOT_WATCHED:
            self._early.setdefault(location, []).append((param_ref, how))
            return
        if (key := (number, location)) in self._told:
            return
        before = self.seen.get(key)
        names = (name,) if before is None else tuple(dict.fromkeys((*before.names, name)))
        watch = next((w for w in list(self._run.watches) if w.number == number), None)
        if watch is not None or number == OF_A_COPY:
            if watch is not None:
                watch.parameters_written()
            counts = (0, 0) if watch is None else (watch.forwards, watch.step)
            kind = "ignored" if how == _IGNORED else "written"
            self.seen[key] = ModuleChanged(number, kind, how, names, location, *counts)


_CALLER = 3  # frames from `_written` to the writing line


def _method_on_data(frame: FrameType) -> str:
    """Return the method that writes to a line's `.data`; "" for a read."""
    code = frame.f_code
    if not is_of_program(code.co_filename):
        return ""
    *_, column, end = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None))
    return _writes_data(code.co_filename, frame.f_lineno, (column, end))


@functools.cache
def _writes_data(file: str, number: int, columns: tuple[int | None, int | None]) -> str:
    """Search the source for `_method_on_data`; `columns` of the `.data` expression."""
    statements = [
        node
        for node in ast.walk(parsed_source(file))
        if isinstance(node, ast.stmt) and node.lineno <= number <= (node.end_lineno or node.lineno)
    ]
    innermost = max(statements, key=lambda node: (node.lineno, -(node.end_lineno or 0)), default=None)

    def has_data(node: ast.AST) -> bool:
        attrs = [child for child in ast.walk(node) if isinstance(child, ast.Attribute) and child.attr == "data"]
        return any((child.col_offset, child.end_col_offset) == columns for child in attrs)

    for node in ast.walk(innermost) if innermost is not None else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr.endswith("_") and has_data(node.func.value):
                return node.func.attr
        targets = node.targets if isinstance(node, ast.Assign) else []
        subscripts = [target for target in targets if isinstance(target, ast.Subscript)]
        if any(map(has_data, [node.target] if isinstance(node, ast.AugAssign) else subscripts)):
            return ".data"
    return ""
