"""Additive terms of a loss, split by autograd graph and differentiated separately.

A loss is `c1 * term1 + c2 * term2 + ...` if its graph starts with linear operations (sums, means, constant factors,
stacking). Each edge to a nonlinear operation is the end of one term.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddpcheck.findings.report import Location
from ddpcheck.gather.autograd.autograd_graph import LossGraph, line_of
from ddpcheck.gather.steps.training_step import run_backward

_MOST_NODES = 2000
_PRODUCTS = frozenset({"Mul", "Div"})  # linear if only one input requires grad
_LINEAR = frozenset(
    {
        *("Add", "Sub", "Rsub", "Neg", "Sum", "Mean", "Stack", "Cat", "Where", "Clone", "ToCopy", "Alias"),
        *("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Expand", "Permute", "Transpose", "T"),
        *("Select", "Slice", "Index"),
    }
)


@dataclass(frozen=True, slots=True)
class Edge:
    """Edge of the autograd graph over which an additive term enters the loss."""

    node: Any  # node that reads the term; None if the term is the whole loss
    index: int  # input index of `node`
    operation: str  # operation that produced the term, e.g. "NllLoss"
    location: Location | None  # user line of the operation, None if unknown
    part: int  # index into the tensors returned by the recipe's loss


def split_loss(total: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[Edge]:
    """Split `total`, the sum of `parts`, into additive terms; return each term's edge."""
    root = total.grad_fn
    part_by_node = {part.grad_fn: number for number, part in enumerate(parts)} if len(parts) > 1 else {}
    edges: list[Edge] = []
    pending: list[tuple[Any, int, Any, int]] = [(None, 0, root, part_by_node.get(root, 0))]
    visited = 0
    while pending:
        parent, index, node, part = pending.pop()
        part = part_by_node.get(node, part)
        inputs = [(i, child) for i, (child, _) in enumerate(node.next_functions) if child is not None]
        kind = re.sub(r"(Backward)?\d*$", "", node.name().rpartition("::")[2])  # "AddBackward0" is "Add"
        visited += 1
        if visited < _MOST_NODES and inputs and (kind in _LINEAR or (kind in _PRODUCTS and len(inputs) == 1)):
            pending.extend((node, i, child, part) for i, child in reversed(inputs))
        else:
            edges.append(Edge(parent, index, kind, line_of(node), part))
    return edges


_NEAR_NODES = 64  # nodes


def nearest_leaf_node(node: Any) -> Any:
    """Return the AccumulateGrad node nearest to a loss term's node; None if too far.

    The node identifies the layer that computed the term: terms that the same layer computed, e.g. one term per sample
    of a batch, have the same nearest AccumulateGrad node.
    """
    return next((n for n in LossGraph([node], limit=_NEAR_NODES).nodes if n.name().endswith("AccumulateGrad")), None)


_Key = tuple[int, Location | None, str]  # identifies a term across forward passes: part of the loss, line, operation
_key: Callable[[Edge], _Key] = operator.attrgetter("part", "location", "operation")


class PairedTerms:
    """Numbering of loss terms by which several forward passes (`runs`) can be compared.

    The key of a term is (part of the loss, line, operation). Terms with the same key are merged into one if their count
    differs between passes (e.g. a term per sample), or if a pass has more than `most` terms. If there are more than
    `most` keys, all terms are merged into one.
    """

    def __init__(self, runs: Sequence[Sequence[Edge]], *, most: int) -> None:
        counts = [Counter(map(_key, edges)) for edges in runs] or [Counter()]
        keys = list(dict.fromkeys(_key(edge) for edges in runs for edge in edges))
        self._separate_keys = {key for key in keys if len({count[key] for count in counts}) == 1}
        if sum(counts[0][key] if key in self._separate_keys else 1 for key in keys) > most:
            self._separate_keys = set()  # e.g. one penalty per parameter
        self._is_merged = len(keys) > most
        self._term_indices: dict[tuple[_Key, int], int] = {}
        for edges in runs:
            for term_key in self._term_keys(edges):
                self._term_indices.setdefault(term_key, 0 if self._is_merged else len(self._term_indices))

    def __len__(self) -> int:
        return len(set(self._term_indices.values()))

    def sort(self, edges: Sequence[Edge]) -> list[list[Edge]]:
        """Return a list per term number, with the edges of one forward pass."""
        terms: list[list[Edge]] = [[] for _ in range(len(self))]
        for edge, term_key in zip(edges, self._term_keys(edges), strict=True):
            if term_key in self._term_indices:
                terms[self._term_indices[term_key]].append(edge)
        return terms

    def _term_keys(self, edges: Sequence[Edge]) -> list[tuple[_Key, int]]:
        seen: Counter[_Key] = Counter()
        term_keys = []
        for edge in edges:
            key = _key(edge)
            term_keys.append((key, seen[key] if key in self._separate_keys else 0))
            seen[key] += 1
        return term_keys


def backward_through_terms(total: torch.Tensor, edges: Sequence[Edge], selected: Sequence[Edge]) -> None:
    """Run backward through only the edges `selected`, among all `edges`; keep the graph."""
    if not selected:
        return  # the term is missing in this forward pass
    kept_edges = {(edge.node, edge.index) for edge in selected}
    excluded: dict[Any, set[int]] = {}
    for edge in edges:
        if (edge.node, edge.index) not in kept_edges:
            excluded.setdefault(edge.node, set()).add(edge.index)
    with contextlib.ExitStack() as stack:
        for node, indices in excluded.items():
            stack.enter_context(node.register_hook(functools.partial(_zero_gradients, indices)))
        run_backward(total, retain_graph=True)


def _zero_gradients(
    indices: set[int], gradients: Sequence[torch.Tensor | None], _outputs: Any
) -> tuple[torch.Tensor | None, ...]:
    return tuple(
        torch.zeros_like(gradient) if index in indices and gradient is not None else gradient
        for index, gradient in enumerate(gradients)
    )
