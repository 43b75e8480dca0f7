"""Tracer of the numbers that functions compute in the first evaluations."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.evidence.parity import EvaluationTraced, TracedValue
from ddpcheck.findings.source_lines import is_of_program, relative_path
from ddpcheck.gather.patching import Recorder, guarded
from ddpcheck.record.source import program_numbers

_MOST_EVALUATIONS = 3
_MOST_BEGUN = 12  # traces started; some turn out to be training
_MOST_VALUES = 2048  # per evaluation
_MOST_LINES = 1 << 15  # per evaluation
_FEW = 16  # max elements of a tensor
_MOST_INSIDE = 32  # max attributes of an object

_Numbers = tuple[float, ...]


class ValueTrace(Recorder, subjects=("parity",)):
    """Tracer of program lines from a possible evaluation to the next backward pass.

    A program with its own trace function is not traced.
    """

    def __init__(self, sink: Callable[[Entry], object], is_loading: Callable[[], bool]) -> None:
        """Initialize; `is_loading`: True while a loader makes a batch, which is not traced."""
        self._sink = sink
        self._is_loading = is_loading
        self._process = os.getpid()
        self._loops: set[CodeType] = set()  # functions that iterate over data loaders
        self._is_on = False
        self._begun = self._written = self._lines = 0
        self._values: list[TracedValue] = []
        self._frames: dict[FrameType, tuple[int, dict[str, _Numbers]]] = {}  # last line, and variables before it
        self._enter, self._step = guarded(self._entered, self), guarded(self._stepped, self)

    def begin(self) -> None:
        """Start tracing a possible evaluation, for example a pass over a loader."""
        self._loops |= {frame.f_code for frame in program_numbers.program_frames()}
        if self._is_on or sys.gettrace() is not None or self._written >= _MOST_EVALUATIONS:
            return
        if self._begun >= _MOST_BEGUN:
            return
        self._begun += 1
        self._is_on = True
        self._lines = 0
        self._values = []
        for frame in program_numbers.program_frames():
            self._frames[frame] = frame.f_lineno, _numbers_in(frame)
            frame.f_trace = self._step
        sys.settrace(self._enter)

    def end(self, *, evaluates: bool, steps: int) -> None:
        """Stop tracing: a backward pass begins, or the script ends."""
        if not self._is_on:
            return
        self._is_on = False
        if sys.gettrace() is self._enter:
            sys.settrace(None)
        for frame in self._frames:
            frame.f_trace = None
        self._frames.clear()
        if evaluates and self._values:
            self._written += 1
            self._sink(EvaluationTraced(steps, tuple(self._values)))

    def _entered(self, frame: FrameType, _event: str, _value: Any) -> Any:
        if self._is_loading() or not is_of_program(frame.f_code.co_filename) or os.getpid() != self._process:
            return None
        self._frames[frame] = frame.f_lineno, _numbers_in(frame)
        return self._step

    def _stepped(self, frame: FrameType, event: str, value: Any) -> Any:
        self._lines += 1
        if frame not in self._frames or event not in ("line", "return"):
            return self._step
        line, before = self._frames[frame]
        now = _numbers_in(frame)
        for name, numbers in now.items():
            if before.get(name) != numbers:
                self._note(frame, line, name, numbers)
        if event == "return":
            if (returned := _numbers_of(value)) is not None:
                # Attribute the result of a function without a data loop to the caller, which passes the arguments.
                outer = frame.f_back if frame.f_code not in self._loops and "self" not in frame.f_locals else None
                outer = outer if outer in self._frames else frame
                self._note(outer, outer.f_lineno, "return", returned)
            del self._frames[frame]
        else:
            self._frames[frame] = frame.f_lineno, now
        if self._lines > _MOST_LINES:
            sys.settrace(None)
        return self._step

    def _note(self, frame: FrameType, line: int, name: str, numbers: _Numbers) -> None:
        if len(self._values) < _MOST_VALUES:
            code = frame.f_code
            self._values.append(TracedValue(relative_path(code.co_filename), line, code.co_name, name, numbers))


def _numbers_in(frame: FrameType) -> dict[str, _Numbers]:
    """Return the numbers in local variables, and inside their objects and mappings."""
    variables: dict[str, _Numbers] = {}
    for name, value in [*frame.f_locals.items()]:
        if (numbers := _numbers_of(value)) is not None:
            variables[name] = numbers
        elif name[:2] != "__":
            items = program_numbers.held_in(name, value)[:_MOST_INSIDE]
            variables |= {path: numbers for path, item in items if (numbers := _numbers_of(item)) is not None}
    return variables


def _numbers_of(value: Any) -> _Numbers | None:
    """Return the numbers in a scalar, or a small tensor, list or dict."""
    if type(value) is bool:
        return None
    if isinstance(value, torch.Tensor) and value.dim():
        if value.numel() > _FEW or value.layout != torch.strided or value.is_complex() or value.device.type == "meta":
            return None
        return tuple(map(float, value.detach().flatten().tolist()))
    if type(value) is dict:
        value = [*value.values()]
    if type(value) in (list, tuple) and 0 < len(value) <= _FEW:
        numbers = [program_numbers.number_of(item) for item in value]
        return tuple(number for number in numbers if number is not None) if None not in numbers else None
    number = program_numbers.number_of(value)
    return None if number is None else (number,)
