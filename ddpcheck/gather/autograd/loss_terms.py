"""Additive terms of a loss: found in its autograd graph, and differentiated one by one.

A loss is `c1 * term1 + c2 * term2 + ...` where its graph begins with operations that are linear in what has a gradient:
sums, means, constant factors, stacking. Each edge at which that stops is the end of one term.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddpcheck.findings.report import Location
from ddpcheck.gather.autograd.autograd_graph import line_of, nodes_behind
from ddpcheck.gather.steps.training_step import run_backward

_MOST_NODES = 2000
_OFF_BY_FACTOR = frozenset({"Mul", "Div"})  # linear where only one side has a gradient
_LINEAR = frozenset(
    {
        *("Add", "Sub", "Rsub", "Neg", "Sum", "Mean", "Stack", "Cat", "Where", "Clone", "ToCopy", "Alias"),
        *("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Expand", "Permute", "Transpose", "T"),
        *("Select", "Slice", "Index"),
    }
)


@dataclass(frozen=True, slots=True)
class Edge:
    """The end of a term: an input of a node of the graph; the whole loss where there is no node."""

    node: Any  # that reads it
    index: int  # of the input
    operation: str  # that made the term ("NllLoss")
    location: Location | None  # the line of the user's code that called it, where it is known
    part: int  # which of the tensors that the recipe's loss returned it belongs to


def split_loss(total: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[Edge]:
    """The ends of the terms that `total`, the sum of `parts`, is made of, from left to right."""
    root = total.grad_fn
    of_part = {part.grad_fn: number for number, part in enumerate(parts)} if len(parts) > 1 else {}
    found: list[Edge] = []
    pending: list[tuple[Any, int, Any, int]] = [(None, 0, root, of_part.get(root, 0))]
    visited = 0
    while pending:
        parent, index, node, part = pending.pop()
        part = of_part.get(node, part)
        inputs = [(i, child) for i, (child, _) in enumerate(node.next_functions) if child is not None]
        kind = re.sub(r"(Backward)?\d*$", "", node.name().rpartition("::")[2])  # "AddBackward0" is "Add"
        visited += 1
        if visited < _MOST_NODES and inputs and (kind in _LINEAR or (kind in _OFF_BY_FACTOR and len(inputs) == 1)):
            pending.extend((node, i, child, part) for i, child in reversed(inputs))
        else:
            found.append(Edge(parent, index, kind, line_of(node), part))
    return found


_NEAR = 64  # nodes


def head_of(node: Any) -> Any:
    """The parameter that is nearest to a term of a loss: terms with the same one are of samples, say, of one batch.

    As the node that takes its gradient; None where there is none so near.
    """
    return next((one for one in nodes_behind([node], _NEAR) if one.name().endswith("AccumulateGrad")), None)


_Key = tuple[int, Location | None, str]  # the same term in another run: part of the loss, line, operation


class PairedTerms:
    """The terms of a loss over several runs of it, numbered alike in all of them.

    A term of which runs have different numbers (one for each sample, say) is taken together with its likes, and so are
    all where there are more than `most`.
    """

    def __init__(self, runs: Sequence[Sequence[Edge]], *, most: int) -> None:
        counts = [Counter(map(_key, edges)) for edges in runs] or [Counter()]
        keys = list(dict.fromkeys(_key(edge) for edges in runs for edge in edges))
        self._apart = {key for key in keys if len({count[key] for count in counts}) == 1}
        if sum(counts[0][key] if key in self._apart else 1 for key in keys) > most:
            self._apart = set()  # a penalty for each parameter, say
        self._together = len(keys) > most
        self._numbers: dict[tuple[_Key, int], int] = {}
        for edges in runs:
            for place in self._places(edges):
                self._numbers.setdefault(place, 0 if self._together else len(self._numbers))

    def __len__(self) -> int:
        return len(set(self._numbers.values()))

    def sort(self, edges: Sequence[Edge]) -> list[list[Edge]]:
        """The edges of one run, by term."""
        terms: list[list[Edge]] = [[] for _ in range(len(self))]
        for edge, place in zip(edges, self._places(edges), strict=True):
            if place in self._numbers:
                terms[self._numbers[place]].append(edge)
        return terms

    def _places(self, edges: Sequence[Edge]) -> list[tuple[_Key, int]]:
        seen: Counter[_Key] = Counter()
        places = []
        for edge in edges:
            key = _key(edge)
            places.append((key, seen[key] if key in self._apart else 0))
            seen[key] += 1
        return places


def _key(edge: Edge) -> _Key:
    return edge.part, edge.location, edge.operation


def backward_of(total: torch.Tensor, edges: Sequence[Edge], of: Sequence[Edge]) -> None:
    """Differentiate the terms that end at `of` alone, of all `edges` of a loss; the graph is kept."""
    if not of:
        return  # a term that this run has not
    kept = {(edge.node, edge.index) for edge in of}
    closed: dict[Any, set[int]] = {}
    for edge in edges:
        if (edge.node, edge.index) not in kept:
            closed.setdefault(edge.node, set()).add(edge.index)
    with contextlib.ExitStack() as stack:
        for node, indices in closed.items():
            stack.enter_context(node.register_hook(functools.partial(_close, indices)))
        run_backward(total, retain_graph=True)


def _close(
    indices: set[int], gradients: Sequence[torch.Tensor | None], _outputs: Any
) -> tuple[torch.Tensor | None, ...]:
    """As a hook on a node: zeros for the inputs with these indices."""
    return tuple(
        torch.zeros_like(gradient) if index in indices and gradient is not None else gradient
        for index, gradient in enumerate(gradients)
    )
