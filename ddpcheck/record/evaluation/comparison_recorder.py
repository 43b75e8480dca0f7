"""What a script compares number by number, after results were gathered in an evaluation and until it trains again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ddpcheck.findings.evidence.evaluation import RowsCompared
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import user_location
from ddpcheck.gather.patching import Patch, patched
from ddpcheck.gather.state.tensor_values import is_shard

_METHODS = ("__sub__", "__rsub__", "__eq__", "__ne__", "sub", "eq", "ne")
_FUNCTIONS = ("sub", "eq", "ne", "dist", "isclose")
_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "cosine_similarity")
_FEWEST, _MOST = 8, 1 << 14  # numbers
_MOST_ROUNDS, _MOST_A_ROUND = 3, 8


class ComparisonRecorder:
    """Follows subtractions, comparisons and losses of two tensors while it is open; hands them to `sink`.

    It puts functions in torch's place for that time only: they would cost in a training loop.
    """

    def __init__(self, sink: Callable[[RowsCompared], object]) -> None:
        """Begin."""
        self._sink = sink
        self._patches: list[Patch] = []
        self._round, self._rounds = -1, 0
        self._size = 0
        self._seen: set[Location | None] = set()

    def open(self, number: int, size: int) -> None:
        """Results of `size` samples are gathered in a round of that number."""
        if number != self._round:
            self._round, self._rounds = number, self._rounds + 1
            self._seen = set()
        self._size = size
        if self._patches or self._rounds > _MOST_ROUNDS:
            return
        for owner, names in ((torch.Tensor, _METHODS), (torch, _FUNCTIONS), (functional, _LOSSES)):
            self._patches += [patched(owner, name, self._meet) for name in names]

    def close(self) -> None:
        """The script trains again, or goes through other data."""
        while self._patches:
            self._patches.pop().undo()

    def _meet(self, one: Any = None, other: Any = None, *_arguments: Any, **named: Any) -> None:
        one, other = named.get("input", one), named.get("other", named.get("target", other))
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or is_shard(one) or is_shard(other):
            return
        count = one.numel()
        if count != other.numel() or not _FEWEST <= count <= _MOST or count % max(1, self._size):
            return
        if len(self._seen) >= _MOST_A_ROUND or (where := user_location()) in self._seen:
            return
        self._seen.add(where)
        if all(t.layout == torch.strided and t.device.type != "meta" and not t.is_complex() for t in (one, other)):
            numbers = [tuple(t.detach().double().flatten().tolist()) for t in (one, other)]
            self._sink(RowsCompared(self._round, where, *numbers))
