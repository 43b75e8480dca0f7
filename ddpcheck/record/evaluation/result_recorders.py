"""Recorders of gathered results: elementwise comparisons, and sums that are reduced repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from ddpcheck.findings.evidence.evaluation import RowsCompared, SumsReduced
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import user_location
from ddpcheck.gather.patching import Patch, Recorder, patched
from ddpcheck.gather.state.fingerprints import is_shard

_METHODS = ("__sub__", "__rsub__", "__eq__", "__ne__", "sub", "eq", "ne")
_FUNCTIONS = ("sub", "eq", "ne", "dist", "isclose")
_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "cosine_similarity")
_FEWEST, _MOST = 8, 1 << 14  # elements
_MOST_ROUNDS, _MOST_A_ROUND = 3, 8


class ComparisonRecorder(Recorder, subjects=("evaluation",)):
    """Recorder of subtractions, comparisons and losses of two tensors while open.

    Patches torch only while open, to avoid overhead in the training loop.
    """

    def __init__(self, sink: Callable[[RowsCompared], object]) -> None:
        self._sink = sink
        self._patches: list[Patch] = []
        self._round, self._rounds = -1, 0
        self._size = 0
        self._seen: set[Location | None] = set()

    def open(self, number: int, size: int) -> None:
        """Start recording: results of `size` samples are gathered in round `number`."""
        if number != self._round:
            self._round, self._rounds = number, self._rounds + 1
            self._seen = set()
        self._size = size
        if self._patches or self._rounds > _MOST_ROUNDS:
            return
        for owner, names in ((torch.Tensor, _METHODS), (torch, _FUNCTIONS), (functional, _LOSSES)):
            self._patches += [patched(owner, name, self._meet) for name in names]

    def close(self) -> None:
        """Stop recording: the script trains again, or iterates over other data."""
        while self._patches:
            self._patches.pop().undo()

    def _meet(self, one: Any = None, other: Any = None, *_arguments: Any, **named: Any) -> None:
        one, other = named.get("input", one), named.get("other", named.get("target", other))
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or is_shard(one) or is_shard(other):
            return
        count = one.numel()
        if count != other.numel() or not _FEWEST <= count <= _MOST or count % max(1, self._size):
            return
        if len(self._seen) >= _MOST_A_ROUND or (location := user_location()) in self._seen:
            return
        self._seen.add(location)
        if all(t.layout == torch.strided and t.device.type != "meta" and not t.is_complex() for t in (one, other)):
            numbers = [tuple(t.detach().double().flatten().tolist()) for t in (one, other)]
            self._sink(RowsCompared(self._round, location, *numbers))


_MOST_ELEMENTS = 8
_MOST_CALLS = 64  # per line
_MOST_LINES = 64
_CALLS = 4  # consecutive calls whose input includes the previous result

_Numbers = tuple[float, ...]


@dataclass(slots=True)
class _Line:
    calls: int = 0
    given: list[_Numbers] = field(default_factory=list)  # inputs of consecutive calls, each including the last result
    left: list[_Numbers] = field(default_factory=list)


class SumRecorder(Recorder, subjects=("evaluation",)):
    """Recorder of all_reduces whose inputs include earlier results, once per line."""

    def __init__(self, sink: Callable[[SumsReduced], object]) -> None:
        self._sink = sink
        self._lines: dict[tuple[str, int], _Line] = {}

    def note_given(self, call: Call, given: Mapping[str, Any]) -> None:
        line = self._line_of(call, given)
        if line is None:
            return
        numbers = _numbers(given["tensor"])
        if not line.left or any(a < b for a, b in zip(numbers, line.left[-1], strict=True)):
            line.given, line.left = [], []
        line.given.append(numbers)

    def note_left(self, call: Call, given: Mapping[str, Any]) -> None:
        line = self._line_of(call, given)
        if line is None or len(line.given) <= len(line.left):
            return
        line.calls += 1
        line.left.append(_numbers(given["tensor"]))
        if len(line.left) == _CALLS:
            self._sink(SumsReduced(Location.parse(call.location), tuple(line.given), tuple(line.left)))
            line.calls = _MOST_CALLS

    def _line_of(self, call: Call, given: Mapping[str, Any]) -> _Line | None:
        tensor, op = given.get("tensor"), given.get("op", dist.ReduceOp.SUM)
        if call.operation != "all_reduce" or not isinstance(tensor, torch.Tensor) or op != dist.ReduceOp.SUM:
            return None
        if given.get("async_op") or len(call.members) < dist.get_world_size() or tensor.requires_grad:
            return None
        key = call.location, tensor.numel()
        if not 0 < tensor.numel() <= _MOST_ELEMENTS or tensor.is_complex() or tensor.layout != torch.strided:
            return None
        if key not in self._lines and len(self._lines) >= _MOST_LINES:
            return None
        line = self._lines.setdefault(key, _Line())
        return line if line.calls < _MOST_CALLS else None


def _numbers(tensor: torch.Tensor) -> _Numbers:
    return tuple(map(float, tensor.detach().flatten().tolist()))
