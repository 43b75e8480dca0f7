"""Recorder of numbers and tensors that a script shows, logs, tracks and saves."""

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
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.evidence.parity import NumbersShown, TensorsSaved
from ddpcheck.findings.replace import replace
from ddpcheck.findings.source_lines import is_of_program
from ddpcheck.gather.patching import Patch, Recorder, guarded, patched
from ddpcheck.gather.steps.gradient_distance import dense
from ddpcheck.recipe.pytree import tree_leaves
from ddpcheck.record.parity.samples import Samples
from ddpcheck.record.rank.module_finder import when_imported
from ddpcheck.record.source import program_numbers

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w]*[A-Za-z_])")
_TIME = re.compile(r"\b\d+:\d\d(?::\d\d(?:\.\d+)?)?\b")  # time of day or duration
_LONGEST = 4096  # max characters of a text
_MOST_SHOWN = 4096
_MOST_SAVED = 16
_MOST_TENSORS = 4096
_FEW = 64
_ORDERS = (2, 1, 4, math.inf)


class Shown(Recorder, subjects=("parity",)):
    """Recorder of shown and saved values, with step count and learning rates."""

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
        self._shown = self._saved = 0
        self._record: Any = None  # last record of `logging`
        self._known: set[float] = set()  # the program's numbers at the begin of the last evaluation
        patched(builtins, "print", self._prints)
        patched(logging.Handler, "handle", self._logs)
        patched(torch, "save", self._saves)
        patched(json, "dump", self._dumps)
        patched(json, "dumps", self._dumps)
        with contextlib.suppress(AttributeError):  # a stream without a writable `write`
            sys.stdout.write = self._writing(sys.stdout.write)  # type: ignore[method-assign]
        writer = "torch.utils.tensorboard.writer"
        when_imported((writer,), lambda module: patched(module.SummaryWriter, "add_scalar", self._tracks))
        Patch(csv, "writer", self._writing_rows)
        when_imported(("tqdm.std",), lambda module: patched(module.tqdm, "set_postfix", self._follows_bar))
        when_imported(("wandb",), lambda module: patched(module, "log", self._tracks_all))

    def look(self) -> None:
        """Record the program's numbers, and possible ratios of them, before an evaluation."""
        known = program_numbers.numbers_of_program()
        counts = [(name.partition(".")[0], value) for name, value in known.items() if value > 1 and value == value // 1]
        shares = {v / n for name, v in known.items() for function, n in counts if name.startswith(f"{function}.")}
        self._known = {*known.values(), *shares}

    def _prints(self, *texts: Any, sep: str | None = None, **_named: Any) -> None:
        self._show("printed", (" " if sep is None else sep).join(map(str, texts)))

    def _logs(self, _handler: Any, record: Any) -> None:
        if record is not self._record:
            self._record = record
            self._show("logged", record.getMessage())

    def _tracks(self, _writer: Any, tag: str, value: Any, *_arguments: Any, **_named: Any) -> None:
        self._tracks_all({tag: value})

    def _tracks_all(self, values: Any, *_arguments: Any, **_named: Any) -> None:
        for name, value in values.items() if isinstance(values, Mapping) else ():
            number = value if isinstance(value, str) else program_numbers.number_of(value)
            if number is not None:
                self._show("tracked", f"{name}: {number}")

    def _follows_bar(self, _bar: Any, values: Any = None, _refresh: bool = True, **named: Any) -> None:
        self._tracks_all({**(values or {}), **named})

    def _writing_rows(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def writer(file: Any, *arguments: Any, **named: Any) -> Any:
            return original(SimpleNamespace(write=self._writing(file.write)), *arguments, **named)

        return writer

    def _writing(self, original: Callable[[str], Any]) -> Callable[[str], Any]:
        shows = guarded(self._writes, self)

        def write(text: str) -> Any:
            shows(text, sys._getframe(1).f_code.co_filename)
            return original(text)

        return write

    def _writes(self, text: str, path: str) -> None:
        if is_of_program(path) or path == csv.__file__:  # skip what `print` writes
            self._show("written", text)

    def _show(self, how: str, text: str) -> None:
        text = _TIME.sub("time", text[:_LONGEST])
        numbers = tuple(_NUMBER.findall(text))[:_FEW]
        if not numbers or os.getpid() != self._process or self._shown >= _MOST_SHOWN:
            return
        self._shown += 1
        during = self._samples.is_under_way
        evaluates = self._samples.evaluates
        rates, known = (
            tuple(index for index, number in enumerate(numbers) if program_numbers.like(number, values))
            for values in (self._rates(), self._known)
        )
        location = program_numbers.line_of_output()
        entry = NumbersShown(how, location, _NUMBER.sub("#", text), numbers, self._steps(), evaluates, during)
        self._sink(replace(entry, known=known if evaluates else (), rates=rates))

    def _saves(self, obj: Any, *_arguments: Any, **_named: Any) -> None:
        if os.getpid() != self._process or self._saved >= _MOST_SAVED:
            return
        self._saved += 1
        tensors = dict(itertools.islice(_named_tensors(obj), _MOST_TENSORS))
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        sizes = {n: _norms(t) for n, t in tensors.items() if t.is_floating_point() and t.device.type != "meta"}
        self._sink(TensorsSaved(program_numbers.line_of_output(), self._steps(), shapes, sizes))
        self._dumps(obj)

    def _dumps(self, obj: Any, *_arguments: Any, **_named: Any) -> None:
        leaves = tree_leaves(obj) if self._shown < _MOST_SHOWN else []
        for number in itertools.islice((leaf for leaf in leaves if type(leaf) is float), _FEW):
            self._show("saved", repr(number))


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
