"""Recorder of values that a script prints, logs, tracks or saves; tracer of evaluations."""

from __future__ import annotations

import builtins
import contextlib
import csv
import functools
import itertools
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.evidence.parity import EvaluationTraced, NumbersShown, TensorsSaved, TracedValue
from ddpcheck.findings.replace import replace
from ddpcheck.findings.source_lines import is_of_program, relative_path
from ddpcheck.gather.patching import Patch, Recorder, guarded, patched
from ddpcheck.gather.steps.gradient_distance import dense
from ddpcheck.recipe.pytree import tree_leaves
from ddpcheck.record.parity.samples import Samples
from ddpcheck.record.rank.environment import when_imported
from ddpcheck.record.source import program_numbers

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w]*[A-Za-z_])")
_TIME = re.compile(r"\b\d+:\d\d(?::\d\d(?:\.\d+)?)?\b")  # time of day or duration
_LONGEST = 4096  # max characters of a text
_MOST_SHOWN = 4096
_MOST_SAVED = 16
_MOST_TENSORS = 4096
_FEW = 64  # max numbers of a text or a saved object
_ORDERS = (2, 1, 4, math.inf)


class ShownRecorder(Recorder, subjects=("parity",)):
    """Recorder of numbers that a script prints, logs, tracks (TensorBoard, wandb) or saves."""

    def __init__(
        self,
        sink: Callable[[Entry], object],
        samples: Samples,
        steps: Callable[[], int],
        rates: Callable[[], set[float]],
    ) -> None:
        self._sink = sink
        self._samples = samples
        self._steps, self._rates = steps, rates
        self._process = os.getpid()
        self._shown_count = self._saved_count = 0
        self._last_record: Any = None  # last record of `logging`
        self._known_numbers: set[float] = set()  # the program's numbers at the begin of the last evaluation
        patched(builtins, "print", self._record_print)
        patched(logging.Handler, "handle", self._record_log)
        patched(torch, "save", self._record_save)
        patched(json, "dump", self._record_dump)
        patched(json, "dumps", self._record_dump)
        with contextlib.suppress(AttributeError):  # a stream without a writable `write`
            sys.stdout.write = self._patched_write(sys.stdout.write)  # type: ignore[method-assign]
        writer = "torch.utils.tensorboard.writer"
        when_imported((writer,), lambda module: patched(module.SummaryWriter, "add_scalar", self._record_scalar))
        Patch(csv, "writer", self._patched_csv_writer)
        when_imported(("tqdm.std",), lambda module: patched(module.tqdm, "set_postfix", self._record_progress_bar))
        when_imported(("wandb",), lambda module: patched(module, "log", self._record_scalars))

    def keep_known_numbers(self) -> None:
        """Keep the numbers known before an evaluation, which cannot be results of the evaluation."""
        known = program_numbers.numbers_of_program()
        counts = [(name.partition(".")[0], value) for name, value in known.items() if value > 1 and value == value // 1]
        shares = {v / n for name, v in known.items() for function, n in counts if name.startswith(f"{function}.")}
        self._known_numbers = {*known.values(), *shares}

    def _record_print(self, *texts: Any, sep: str | None = None, **_named: Any) -> None:
        self._add_numbers("printed", (" " if sep is None else sep).join(map(str, texts)))

    def _record_log(self, _handler: Any, record: Any) -> None:
        if record is not self._last_record:
            self._last_record = record
            self._add_numbers("logged", record.getMessage())

    def _record_scalar(self, _writer: Any, tag: str, value: Any, *_arguments: Any, **_named: Any) -> None:
        self._record_scalars({tag: value})

    def _record_scalars(self, values: Any, *_arguments: Any, **_named: Any) -> None:
        for name, value in values.items() if isinstance(values, Mapping) else ():
            number = value if isinstance(value, str) else program_numbers.number_of(value)
            if number is not None:
                self._add_numbers("tracked", f"{name}: {number}")

    def _record_progress_bar(self, _bar: Any, values: Any = None, _refresh: bool = True, **named: Any) -> None:
        self._record_scalars({**(values or {}), **named})

    def _patched_csv_writer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def writer(file: Any, *arguments: Any, **named: Any) -> Any:
            return original(SimpleNamespace(write=self._patched_write(file.write)), *arguments, **named)

        return writer

    def _patched_write(self, original: Callable[[str], Any]) -> Callable[[str], Any]:
        shows = guarded(self._record_write, self)

        def write(text: str) -> Any:
            shows(text, sys._getframe(1).f_code.co_filename)
            return original(text)

        return write

    def _record_write(self, text: str, path: str) -> None:
        if is_of_program(path) or path == csv.__file__:  # skip what `print` writes
            self._add_numbers("written", text)

    def _add_numbers(self, how: str, text: str) -> None:
        text = _TIME.sub("time", text[:_LONGEST])
        numbers = tuple(_NUMBER.findall(text))[:_FEW]
        if not numbers or os.getpid() != self._process or self._shown_count >= _MOST_SHOWN:
            return
        self._shown_count += 1
        during = self._samples.is_under_way
        evaluates = self._samples.evaluates
        rates, known = (
            tuple(index for index, number in enumerate(numbers) if program_numbers.numbers_printed_as(number, values))
            for values in (self._rates(), self._known_numbers)
        )
        location = program_numbers.line_of_output()
        entry = NumbersShown(how, location, _NUMBER.sub("#", text), numbers, self._steps(), evaluates, during)
        self._sink(replace(entry, known=known if evaluates else (), rates=rates))

    def _record_save(self, obj: Any, *_arguments: Any, **_named: Any) -> None:
        if os.getpid() != self._process or self._saved_count >= _MOST_SAVED:
            return
        self._saved_count += 1
        tensors = dict(itertools.islice(_named_tensors(obj), _MOST_TENSORS))
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        sizes = {n: _norms(t) for n, t in tensors.items() if t.is_floating_point() and t.device.type != "meta"}
        self._sink(TensorsSaved(program_numbers.line_of_output(), self._steps(), shapes, sizes))
        self._record_dump(obj)

    def _record_dump(self, obj: Any, *_arguments: Any, **_named: Any) -> None:
        leaves = tree_leaves(obj) if self._shown_count < _MOST_SHOWN else []
        for number in itertools.islice((leaf for leaf in leaves if type(leaf) is float), _FEW):
            self._add_numbers("saved", repr(number))


def _norms(tensor: torch.Tensor) -> tuple[float, ...]:
    """Return norms of several orders, and the 2-norm of the positive elements."""
    values = dense(tensor).detach()
    if not values.numel():
        return (0.0,)
    norm = functools.partial(torch.linalg.vector_norm, dtype=torch.float64)
    return tuple(torch.stack([*(norm(values, order) for order in _ORDERS), norm(values.clamp(min=0))]).tolist())


def _named_tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path or "tensor", value
    elif isinstance(value, nn.Module):
        yield from ((f"{path}{name}", tensor) for name, tensor in value.state_dict().items())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named_tensors(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _named_tensors(item, f"{path}[{index}]")


_MOST_EVALUATIONS = 3
_MOST_STARTED = 12  # traces started; some turn out to be training
_MOST_VALUES = 2048  # max values of an evaluation
_MOST_LINES = 1 << 15  # max lines executed in an evaluation
_FEW_ELEMENTS = 16  # max elements of a tensor
_MOST_INSIDE = 32  # max attributes of an object

_Numbers = tuple[float, ...]


class ValueTrace(Recorder, subjects=("parity",)):
    """Tracer of numbers that program lines assign or return in a possible evaluation.

    Traces until the next backward pass. A program with its own trace function is not traced.
    """

    def __init__(self, sink: Callable[[Entry], object], is_loading: Callable[[], bool]) -> None:
        self._sink = sink
        self._is_loading = is_loading  # returns True while a loader makes a batch, which is not traced
        self._process = os.getpid()
        self._loops: set[CodeType] = set()  # functions that iterate over data loaders
        self._is_tracing = False
        self._started_count = self._evaluation_count = self._lines = 0
        self._values: list[TracedValue] = []
        self._frames: dict[FrameType, tuple[int, dict[str, _Numbers]]] = {}  # last line, and variables before it
        self._call_tracer, self._line_tracer = guarded(self._trace_call, self), guarded(self._trace_line, self)

    def begin(self) -> None:
        """Start tracing a possible evaluation, for example a pass over a loader."""
        self._loops |= {frame.f_code for frame in program_numbers.program_frames()}
        if self._is_tracing or sys.gettrace() is not None or self._evaluation_count >= _MOST_EVALUATIONS:
            return
        if self._started_count >= _MOST_STARTED:
            return
        self._started_count += 1
        self._is_tracing = True
        self._lines = 0
        self._values = []
        for frame in program_numbers.program_frames():
            self._frames[frame] = frame.f_lineno, _numbers_in(frame)
            frame.f_trace = self._line_tracer
        sys.settrace(self._call_tracer)

    def end(self, *, evaluates: bool, steps: int) -> None:
        """Stop tracing; write the traced values if the script evaluates."""
        if not self._is_tracing:
            return
        self._is_tracing = False
        if sys.gettrace() is self._call_tracer:
            sys.settrace(None)
        for frame in self._frames:
            frame.f_trace = None
        self._frames.clear()
        if evaluates and self._values:
            self._evaluation_count += 1
            self._sink(EvaluationTraced(steps, tuple(self._values)))

    def _trace_call(self, frame: FrameType, _event: str, _value: Any) -> Any:
        if self._is_loading() or not is_of_program(frame.f_code.co_filename) or os.getpid() != self._process:
            return None
        self._frames[frame] = frame.f_lineno, _numbers_in(frame)
        return self._line_tracer

    def _trace_line(self, frame: FrameType, event: str, value: Any) -> Any:
        self._lines += 1
        if frame not in self._frames or event not in ("line", "return"):
            return self._line_tracer
        line, before = self._frames[frame]
        now = _numbers_in(frame)
        for name, numbers in now.items():
            if before.get(name) != numbers:
                self._add_value(frame, line, name, numbers)
        if event == "return":
            if (returned := _numbers_of(value)) is not None:
                # Attribute the result of a function without a data loop to the caller, which passes the arguments.
                outer = frame.f_back if frame.f_code not in self._loops and "self" not in frame.f_locals else None
                outer = outer if outer in self._frames else frame
                self._add_value(outer, outer.f_lineno, "return", returned)
            del self._frames[frame]
        else:
            self._frames[frame] = frame.f_lineno, now
        if self._lines > _MOST_LINES:
            sys.settrace(None)
        return self._line_tracer

    def _add_value(self, frame: FrameType, line: int, name: str, numbers: _Numbers) -> None:
        if len(self._values) < _MOST_VALUES:
            code = frame.f_code
            self._values.append(TracedValue(relative_path(code.co_filename), line, code.co_name, name, numbers))


def _numbers_in(frame: FrameType) -> dict[str, _Numbers]:
    """Return the numbers in local variables, and inside objects and mappings, by variable path."""
    variables: dict[str, _Numbers] = {}
    for name, value in [*frame.f_locals.items()]:
        if (numbers := _numbers_of(value)) is not None:
            variables[name] = numbers
        elif name[:2] != "__":
            items = program_numbers.items_with_paths(name, value)[:_MOST_INSIDE]
            variables |= {path: numbers for path, item in items if (numbers := _numbers_of(item)) is not None}
    return variables


def _numbers_of(value: Any) -> _Numbers | None:
    if type(value) is bool:
        return None
    if isinstance(value, torch.Tensor) and value.dim():
        is_plain = value.layout == torch.strided and not value.is_complex() and value.device.type != "meta"
        if value.numel() > _FEW_ELEMENTS or not is_plain:
            return None
        return tuple(map(float, value.detach().flatten().tolist()))
    if type(value) is dict:
        value = [*value.values()]
    if type(value) in (list, tuple) and 0 < len(value) <= _FEW_ELEMENTS:
        numbers = [program_numbers.number_of(item) for item in value]
        return tuple(number for number in numbers if number is not None) if None not in numbers else None
    number = program_numbers.number_of(value)
    return None if number is None else (number,)
