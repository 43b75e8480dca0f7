"""The autograd graph as plain nodes and edges."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class Operations:
    """A graph whose nodes are Python identities.

    Attributes:
        nodes: The operations themselves, each after those that it reads; while they are kept, nothing else gets their
            identities.
        names: Of the operations, from the losses backwards.
        edges: In the direction of the data; parameters and losses take part by the identity of their tensor.
    """

    nodes: list[Any] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    edges: dict[tuple[int, int], None] = field(default_factory=dict)


def read_operations(roots: Sequence[torch.Tensor], leaves: Container[int]) -> Operations:
    """The autograd graph behind `roots`, depth first; leaves stand directly at the operations that read them.

    Args:
        roots: The losses, and tensors whose path ends before a loss.
        leaves: The identities of the leaves to keep.
    """
    found = Operations()
    path: list[tuple[Any, Iterator[tuple[Any, int]]]] = []  # an operation, and those of its inputs that are left

    def enter(node: Any) -> None:
        if id(node) not in found.names:
            found.names[id(node)] = type(node).__name__
            path.append((node, iter(node.next_functions)))

    for root in roots:
        if root.grad_fn is None:
            continue
        enter(root.grad_fn)
        while path:
            reader, inputs = path[-1]
            node = next((node for node, _ in inputs if node is not None), None)
            if node is None:
                found.nodes.append(path.pop()[0])
            elif type(node).__name__ != "AccumulateGrad":
                found.edges[id(node), id(reader)] = None
                enter(node)
            elif id(node.variable) in leaves:
                found.edges[id(node.variable), id(reader)] = None
        found.edges[id(root.grad_fn), id(root)] = None
    return found
