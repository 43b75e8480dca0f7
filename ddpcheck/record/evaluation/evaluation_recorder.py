"""Recorder of evaluations: counters of their loops, exchanged results, and metrics printed or saved."""

from __future__ import annotations

import builtins
import inspect
import itertools
import logging
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.data import Subset

from ddpcheck.findings.evidence.evaluation import (
    EvaluationPass,
    MetricShown,
    ResultExchanged,
    RowsCompared,
    ShownNumber,
)
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import frames_from, is_installed, is_user_file, user_location
from ddpcheck.gather.patching import Patch, Recorder, patched
from ddpcheck.gather.state.fingerprints import is_dtensor
from ddpcheck.recipe.pytree import tree_leaves
from ddpcheck.record.source import program_numbers
from ddpcheck.record.source.program_numbers import lines_after, lines_of_value, numbers_of_conditions

_MOST_PASSES = 3  # max recorded passes of a loader
_MOST_ROUNDS = 16  # max rounds; training after an evaluation starts a round
_MOST_SHOWN = _MOST_EXCHANGED = 64  # max entries per round
_FEW = 64  # max elements of a tensor that is recorded in full
_MOST_CHARS = 4096  # max characters of a printed text
_MOST_LABELS = 1 << 14  # max samples of a dataset or of a collective's input
_MOST_COLUMNS = 8  # max floating-point values per row
_MOST_PARTS = 8  # max parts of a gathered object
_MOST_ROWS = 1 << 11  # max samples with recorded per-sample values
_MOST_HELD = 4  # max objects with a value per sample
_MAX_ROUNDED_CHARS = 7  # max characters of a number that may be rounded
_DECIMAL = re.compile(r"(?<![\w.])-?\d+\.\d+(?:e[+-]?\d+)?(?![\w.]*\w)")
_INPUT_NAMES = ("tensor", "input_tensor", "obj", "object", "self", "input")  # argument names of collective inputs
_STATE_KEYS = ("param_groups", "_last_lr", "growth_factor")  # keys in states of optimizers, schedulers and scalers
_RESULT_WORDS = ("reduce", "gather")  # in names of collectives
_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
_Entry = EvaluationPass | ResultExchanged | MetricShown | RowsCompared


@dataclass(slots=True)
class _OpenPass:
    """Unfinished pass over a loader, possibly an evaluation, with program values at its begin."""

    backwards: int
    numbers: Mapping[str, float]
    counters: Mapping[str, bool]  # by variable with several numbers: True if any is nonzero
    exchanged: list[ResultExchanged] = field(default_factory=list)


class EvaluationRecorder(Recorder, subjects=("evaluation",)):
    """Recorder of loader passes without backward, and of results exchanged, printed or saved."""

    def __init__(self, sink: Callable[[_Entry], object]) -> None:
        self._sink = sink
        self.awaits_backward = False  # True if a pass began or ended since the last backward pass
        self._round = 0
        self._evaluated = False  # True if an evaluation ended in this round
        self._backwards = 0
        self._remaining = [0, 0]  # remaining exchanges and shown numbers to write in this round
        self._open_passes: dict[tuple[int, int], _OpenPass] = {}
        self._last_evaluation: tuple[int, int] | None = None  # last evaluation
        self._unfinished: tuple[_OpenPass, EvaluationPass] | None = (
            None  # last evaluation, if its last batch may be in progress
        )
        self._references: set[int] = set()  # loaders whose datasets were recorded
        self._record: Any = None  # last record of `logging`
        self._size = self._samples = 0  # dataset size and samples on this rank, of the last evaluation
        self._comparisons = ComparisonRecorder(sink)
        patched(builtins, "print", self._note_print)
        patched(logging.Handler, "handle", self._note_log)
        patched(torch, "save", self._note_save)

    def note_backward(self, _loss: Any) -> None:
        """End the current round (training, then evaluations) at the first backward after an evaluation."""
        self.awaits_backward = False
        self._backwards += 1
        self._unfinished = None
        self._comparisons.close()
        if self._evaluated:
            self._evaluated = False
            self._round += 1

    # Passes

    def note_pass(self, entry: LoaderPass, dataset: Any) -> None:
        """Record the begin (first call) or end (second call) of a pass over `dataset`."""
        self.awaits_backward = True
        if entry.number >= _MOST_PASSES or self._round >= _MOST_ROUNDS:
            self._remaining = [0, 0]  # later results may belong to this pass
            return
        key = (entry.loader, entry.number)
        pass_ = self._open_passes.pop(key, None)
        if pass_ is None:
            self._comparisons.close()
            counters = {name: bool(numbers.any()) for name, numbers in program_numbers.counters_of_program().items()}
            self._open_passes[key] = _OpenPass(self._backwards, program_numbers.numbers_of_program(), counters)
            return
        if not entry.exhausted or entry.trains or not entry.batches or self._backwards > pass_.backwards:
            return
        if not self._evaluated:
            self._evaluated, self._remaining = True, [_MOST_EXCHANGED, _MOST_SHOWN]
        self._last_evaluation, self._size, self._samples = key, entry.size, len(entry.indices)
        if any(exchanged.rows for exchanged in pass_.exchanged):
            self._comparisons.open(self._round, entry.size)
        attrs = {} if entry.loader in self._references else _dataset_attributes(dataset, entry.size)
        self._references.add(entry.loader)
        labels, floats = _per_sample(attrs, entry.size)
        numbers, *more = _changes_since(pass_, len(entry.indices))
        written = EvaluationPass(self._round, entry.loader, entry.number, numbers, labels, lines_after(), floats, *more)
        self._sink(written)
        self._unfinished = (pass_, written) if _is_fetched_ahead() else None
        for exchanged in pass_.exchanged:
            self._sink(replace(exchanged, round=self._round))

    def _rewrite_evaluation(self, call: Call | None = None) -> None:
        """Write the last evaluation again: the program may count its last batch later."""
        if self._unfinished is None:
            return
        pass_, written = self._unfinished
        if call is None or all(o.location != Location.parse(call.location) for o in pass_.exchanged):  # an older batch
            self._unfinished = None
            numbers, tables, rows = _changes_since(pass_, self._samples)
            self._sink(replace(written, numbers=numbers, tables=tables, rows=rows))

    # Collectives

    def note_collective(self, call: Call, call_args: Mapping[str, Any]) -> None:
        if call.operation.startswith("broadcast"):
            self._note_broadcast(call_args)
        if not any(word in call.operation for word in _RESULT_WORDS):
            return
        under_way = self._candidates()
        if (not under_way and not self._evaluated) or self._round >= _MOST_ROUNDS:
            return
        value = next((call_args[name] for name in _INPUT_NAMES if call_args.get(name) is not None), None)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return
        entry = _describe_exchange(value, self._round, call, during=bool(under_way))
        entry = replace(
            entry,
            evaluation=under_way[-1] if under_way else self._last_evaluation,
            sums=call.operation in ("all_reduce", "reduce") and call_args.get("op", dist.ReduceOp.SUM) in _SUMS,
            shown=0 if under_way else _MOST_SHOWN - self._remaining[1],
            lines=lines_of_value(),
        )
        if under_way:
            exchanged = self._open_passes[under_way[-1]].exchanged
            if len(exchanged) < _MOST_EXCHANGED:
                exchanged.append(entry)
            return
        self._rewrite_evaluation(call)
        if not isinstance(value, torch.Tensor) or entry.rows:
            self._comparisons.open(self._round, self._size)
        columns = program_numbers.columns_of(value, self._samples)
        if columns and not isinstance(value, torch.Tensor):
            entry = replace(entry, rows=(), values=())
        if not columns and not entry.rows and isinstance(value, dict | tuple) and len(value) <= _MOST_PARTS:
            columns = list(value.values() if isinstance(value, dict) else value)  # predictions and labels
        parts = [(_row_labels(column), _row_values(column)) for column in columns]
        for item in (entry, *(replace(entry, numbers=(), rows=rows, values=values) for rows, values in parts if rows)):
            if self._remaining[0] > 0:
                self._remaining[0] -= 1
                self._sink(item)

    # Shown values

    def _note_broadcast(self, call_args: Mapping[str, Any]) -> None:
        value = call_args.get("tensor", call_args.get("object_list"))
        is_small = not isinstance(value, torch.Tensor) or (value.is_floating_point() and value.numel() <= _FEW)
        if call_args.get("src") == dist.get_rank() and is_small and self._is_after_evaluation():
            leaves = value.flatten().tolist() if isinstance(value, torch.Tensor) else tree_leaves(value)
            floats = (leaf for leaf in itertools.islice(leaves, _FEW) if type(leaf) is float)
            self._write_shown("broadcast", [ShownNumber("", (number,)) for number in floats])

    def _note_print(self, *texts: Any, **_named: Any) -> None:
        if self._is_after_evaluation():
            self._write_shown("printed", list(itertools.chain.from_iterable(map(_fractional_numbers_in, texts))))

    def _note_log(self, _handler: Any, record: Any) -> None:
        if self._is_after_evaluation() and record is not self._record:
            self._record = record
            self._write_shown("logged", _fractional_numbers_in(record.getMessage()))

    def _note_save(self, obj: Any, *_arguments: Any, **_named: Any) -> None:
        if not self._is_after_evaluation():
            return
        leaves = itertools.islice((leaf for leaf in tree_leaves(_without_states(obj)) if type(leaf) is float), _FEW)
        self._write_shown("saved", [ShownNumber("", (leaf,)) for leaf in leaves])
        self._write_shown("decides", [ShownNumber("", (value,)) for value in numbers_of_conditions()])

    def _is_after_evaluation(self) -> bool:
        return self._evaluated and self._remaining[1] > 0 and self._round < _MOST_ROUNDS and not self._candidates()

    def _candidates(self) -> list[tuple[int, int]]:
        """Return keys of open passes without a backward pass so far: possible evaluations."""
        return [key for key, pass_ in self._open_passes.items() if pass_.backwards == self._backwards]

    def _write_shown(self, how: str, numbers: list[ShownNumber]) -> None:
        if not numbers:
            return
        self._rewrite_evaluation()
        self._remaining[1] -= 1
        if any(shown.text for shown in numbers):
            known = set(program_numbers.numbers_of_program().values())
            equal_counts = {s.text: program_numbers.numbers_printed_as(s.text, known) for s in numbers if s.text}
            numbers = [replace(o, values=tuple({*o.values, *equal_counts[o.text]})) if o.text else o for o in numbers]
        self._sink(MetricShown(self._round, how, program_numbers.line_of_output(), tuple(numbers[:_FEW])))


def _changes_since(opened: _OpenPass, samples: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the program's results of a pass: changed numbers, confusion matrices, values per sample."""
    current = program_numbers.numbers_of_program()
    numbers = {name: value for name, value in current.items() if opened.numbers.get(name) != value}
    tables = {}
    for name, counter in program_numbers.counters_of_program().items():
        if opened.counters.get(name, False) or not counter.any():
            continue
        if name in opened.counters:
            numbers |= program_numbers.parts_of_counter(name, counter, samples)
        if counter.dim() == 2 and len(counter) == counter.shape[1] and bool((counter == counter.floor().abs()).all()):
            tables[name] = tuple(counter.flatten().tolist())
    labels = program_numbers.labels_of_program(samples)
    rows = {name: tuple(map(float, t.tolist())) for name, t in labels.items()} if samples <= _MOST_ROWS else {}
    for name, value in program_numbers.program_contents() if 1 < samples <= _MOST_ROWS else ():
        if len(rows) < _MOST_HELD and _rows_in(value) == samples and len(floats := _row_values(value)) == samples:
            rows[name] = floats
    equal_counts = {(a, b): float((labels[a] == labels[b]).sum()) for a, b in itertools.combinations(labels, 2)}
    return numbers | {f"{a} == {b.partition('.')[2]}": count for (a, b), count in equal_counts.items()}, tables, rows


def _rows_in(value: Any) -> int:
    if type(value) is list and value and isinstance(value[0], torch.Tensor):
        return sum(map(_length, value))
    return _length(value) if type(value) in (list, torch.Tensor) or type(value).__module__ == "numpy" else 0


def _is_fetched_ahead() -> bool:
    """Return True if a package or generator iterates over the loader, and may prefetch."""
    codes = (frame.f_code for frame in frames_from(sys._getframe(1)))
    code = next((code for code in codes if is_user_file(code.co_filename)), None)
    return code is not None and (is_installed(code.co_filename) or bool(code.co_flags & inspect.CO_GENERATOR))


def _without_states(obj: Any) -> Any:
    if type(obj) in (dict, OrderedDict):
        return {} if not obj.keys().isdisjoint(_STATE_KEYS) else {key: _without_states(obj[key]) for key in obj}
    return [_without_states(item) for item in obj] if type(obj) in (list, tuple) else obj


def _describe_exchange(value: Any, number: int, call: Call, *, during: bool) -> ResultExchanged:
    plain = ResultExchanged(number, call.operation, Location.parse(call.location), during)
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.device.type == "meta" or value.is_complex():
            return plain
        numbers = tuple(map(float, value.detach().flatten().tolist())) if value.numel() <= _FEW else ()
        is_integral = not value.is_floating_point() and value.dtype != torch.bool
        if value.is_floating_point() and 1 < value.numel() <= 1 << 16:
            is_integral = bool((value.detach() == value.detach().round()).all())
        total = float(value.detach().double().sum()) if is_integral and value.numel() > 1 else None
    else:
        values = [program_numbers.number_of(leaf) for leaf in itertools.islice(tree_leaves(value), _FEW + 1)]
        known = [number for number in values if number is not None]
        numbers, total = tuple(known) if len(values) <= _FEW else (), None
    return replace(plain, numbers=numbers, total=total, rows=_row_labels(value), values=_row_values(value))


def _flattened(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(item, list) for item in value):
        return list(itertools.islice(itertools.chain.from_iterable(value), _MOST_LABELS + 1))
    return value


def _row_values(value: Any) -> tuple[float, ...]:
    value = _flattened(value)
    if isinstance(value, list) and value and all(type(item) is torch.Tensor and item.dim() for item in value):
        parts = [_floats_of(item) for item in value]
        return tuple(itertools.chain.from_iterable(parts)) if all(parts) else ()
    return _floats_of(value)


def _floats_of(value: Any) -> tuple[float, ...]:
    if isinstance(value, list) and len(value) <= _MOST_LABELS and all(type(item) is float for item in value):
        return tuple(value)
    array = program_numbers.array_of(value, "f")
    if array is None or not array.is_floating_point() or not array.dim() or not 1 <= len(array) <= _MOST_LABELS:
        return ()
    return tuple(array.flatten().tolist()) if array.numel() <= _MOST_COLUMNS * len(array) else ()


def _row_labels(value: Any) -> tuple[int, ...]:
    """Return the label of each row: integers in `value`, or classes derived from scores."""
    value = _flattened(value)
    sizes = [_length(x) for x in value] if isinstance(value, list) and value and hasattr(value[0], "shape") else []
    rows = program_numbers.labels_in(value, sum(sizes) or _length(value))
    if rows is None and isinstance(value, list) and value and len(value) <= _MOST_LABELS:
        if all(type(x) is float for x in value):
            value = torch.tensor(value)
    scores = program_numbers.array_of(value, "")
    if rows is None and scores is not None and scores.is_floating_point() and 1 < _length(scores) <= _MOST_LABELS:
        if scores.numel() == len(scores):
            threshold = 0.5 if 0 <= float(scores.min()) <= float(scores.max()) <= 1 else 0
            rows = (scores.flatten() > threshold).long()
    return () if rows is None else tuple(rows.tolist())


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") and getattr(value, "shape", True) != () else 0


def _dataset_attributes(dataset: Any, size: int) -> dict[str, Any]:
    """Return a dataset's attributes; for a `Subset`, also the attributes' rows at its indices."""
    attrs = dict(getattr(dataset, "__dict__", None) or {})
    attrs |= {f"tensors[{number}]": tensor for number, tensor in enumerate(getattr(dataset, "tensors", None) or ())}
    if type(dataset) is Subset and size <= _MOST_LABELS:
        base_attrs = _dataset_attributes(dataset.dataset, _MOST_LABELS + 1)
        for name, tensor in base_attrs.items():
            if type(tensor) is torch.Tensor and tensor.dim() and len(tensor) > max(dataset.indices, default=0):
                attrs[name] = tensor[list(dataset.indices)]
    return attrs


def _per_sample(attrs: Mapping[str, Any], size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return attributes with a label per sample, and attributes with floating-point values per sample."""
    labels, floats = {}, {}
    for name, value in attrs.items() if 1 < size <= _MOST_LABELS else ():
        is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        if not is_floating and (rows := program_numbers.labels_in(value, size)) is not None:
            labels[name] = tuple(rows.tolist())
        is_array = hasattr(value, "shape") or type(value) is list
        if is_array and _length(value) == size and (numbers := _floats_of(value)):
            floats[name] = numbers
    return labels, floats


def _fractional_numbers_in(value: Any) -> list[ShownNumber]:
    if isinstance(value, str):
        return [ShownNumber(text) for text in _DECIMAL.findall(value[:_MOST_CHARS])]
    numbers = [program_numbers.number_of(leaf) for leaf in itertools.islice(tree_leaves(value), _FEW)]
    shown = [number for number in numbers if number is not None and number != int(number)]
    return [ShownNumber(text if len(text := repr(number)) <= _MAX_ROUNDED_CHARS else "", (number,)) for number in shown]


_METHODS = ("__sub__", "__rsub__", "__eq__", "__ne__", "sub", "eq", "ne")
_FUNCTIONS = ("sub", "eq", "ne", "dist", "isclose")
_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "cosine_similarity")
_FEWEST_COMPARED, _MOST_COMPARED = 8, 1 << 14  # elements
_MOST_COMPARED_ROUNDS, _MOST_COMPARISONS = 3, 8  # evaluations, and lines of each


class ComparisonRecorder(Recorder, subjects=("evaluation",)):
    """Recorder of tensors compared in evaluations (equality, difference, loss); patches torch only while open."""

    def __init__(self, sink: Callable[[RowsCompared], object]) -> None:
        self._sink = sink
        self._patches: list[Patch] = []
        self._round, self._rounds = -1, 0
        self._size = 0
        self._seen: set[Location | None] = set()

    def open(self, number: int, size: int) -> None:
        """Start recording in round `number` of evaluations, over a dataset of `size` samples."""
        if number != self._round:
            self._round, self._rounds = number, self._rounds + 1
            self._seen = set()
        self._size = size
        if self._patches or self._rounds > _MOST_COMPARED_ROUNDS:
            return
        for owner, names in ((torch.Tensor, _METHODS), (torch, _FUNCTIONS), (functional, _LOSSES)):
            self._patches += [patched(owner, name, self._note_comparison) for name in names]

    def close(self) -> None:
        """Stop recording; called when the script trains again or iterates over other data."""
        while self._patches:
            self._patches.pop().undo()

    def _note_comparison(self, a: Any = None, b: Any = None, *_arguments: Any, **named: Any) -> None:
        a, b = named.get("input", a), named.get("other", named.get("target", b))
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or is_dtensor(a) or is_dtensor(b):
            return
        count = a.numel()
        if count != b.numel() or not _FEWEST_COMPARED <= count <= _MOST_COMPARED or count % max(1, self._size):
            return
        if len(self._seen) >= _MOST_COMPARISONS or (location := user_location()) in self._seen:
            return
        self._seen.add(location)
        if all(t.layout == torch.strided and t.device.type != "meta" and not t.is_complex() for t in (a, b)):
            numbers = [tuple(t.detach().double().flatten().tolist()) for t in (a, b)]
            self._sink(RowsCompared(self._round, location, *numbers))
