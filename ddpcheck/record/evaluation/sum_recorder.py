"""Sums that a script reduces again and again: each time all_reduce is given what it has left before, and more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ddpcheck.findings.evidence.evaluation import SumsReduced
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Location

_MOST_ELEMENTS = 8
_MOST_CALLS = 64  # at a line
_MOST_LINES = 64
_CALLS = 4  # one after the other, of which each has the result of the one before in it

_Numbers = tuple[float, ...]


@dataclass(slots=True)
class _Line:
    calls: int = 0
    given: list[_Numbers] = field(default_factory=list)  # of calls of which each has the result of the one before in it
    left: list[_Numbers] = field(default_factory=list)


class SumRecorder:
    """Hands `sink` some calls at a line where that is so, once a line."""

    def __init__(self, sink: Callable[[SumsReduced], object]) -> None:
        self._sink = sink
        self._lines: dict[tuple[str, int], _Line] = {}

    def note_given(self, call: Call, given: Mapping[str, Any]) -> None:
        """A collective is about to be made."""
        one = self._line_of(call, given)
        if one is None:
            return
        numbers = _numbers(given["tensor"])
        if not one.left or any(a < b for a, b in zip(numbers, one.left[-1], strict=True)):
            one.given, one.left = [], []
        one.given.append(numbers)

    def note_left(self, call: Call, given: Mapping[str, Any]) -> None:
        """It has been made."""
        one = self._line_of(call, given)
        if one is None or len(one.given) <= len(one.left):
            return
        one.calls += 1
        one.left.append(_numbers(given["tensor"]))
        if len(one.left) == _CALLS:
            self._sink(SumsReduced(Location.parse(call.location), tuple(one.given), tuple(one.left)))
            one.calls = _MOST_CALLS

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
        one = self._lines.setdefault(key, _Line())
        return one if one.calls < _MOST_CALLS else None


def _numbers(tensor: torch.Tensor) -> _Numbers:
    return tuple(map(float, tensor.detach().flatten().tolist()))
