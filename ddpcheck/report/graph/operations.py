"""The autograd graph as torchviz draws it, as plain nodes and edges without identities."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ddpcheck.findings.errors import UsageError

_STATEMENT = re.compile(r"\t(?P<node>\d+)(?: -> (?P<target>\d+))?(?P<attributes>.*)", re.DOTALL)
_LABEL = re.compile(r'label="?(?P<label>[\w.:<>]+)')
_ACCUMULATES = "AccumulateGrad"


@dataclass(slots=True)
class Operations:
    """A graph whose nodes are Python identities, valid while the graph lives.

    Attributes:
        names: Of the operations, from the losses backwards.
        edges: In the direction of the data; parameters and losses take part by the identity of their tensor.
    """

    names: dict[int, str] = field(default_factory=dict)
    edges: dict[tuple[int, int], None] = field(default_factory=dict)


def read_operations(roots: Sequence[torch.Tensor], parameters: Mapping[int, torch.Tensor], *, size: int) -> Operations:
    """The autograd graph behind `roots`, as `torchviz.make_dot` sees it.

    What torchviz adds beside the graph (tensors that custom Functions saved, bases of views) and its nodes that only
    hand a gradient to a parameter are left out: parameters stand directly at the operations that read them.

    Args:
        roots: The losses, and tensors whose path ends before a loss.
        parameters: The leaves, by identity.
        size: Number of nodes; torchviz recurses once for each at most.

    Raises:
        UsageError: torchviz cannot draw this graph.
    """
    make_dot = _make_dot()
    try:
        with _recursion_limit(2 * size + 1000):
            # Names would go through torchviz's labels, where quotes and backslashes change; numbers do not.
            body = make_dot(tuple(roots), params={str(key): leaf for key, leaf in parameters.items()}).body
    except Exception as error:  # saved tensors that are freed already, a custom Function with an odd attribute
        raise UsageError(f"torchviz cannot draw this graph ({type(error).__name__}: {error})") from error
    kinds = _Statements(body)
    leaves = set(parameters) | {id(root) for root in roots}
    skipped = {node for node, label in kinds.labels.items() if label == _ACCUMULATES}
    into: dict[int, list[int]] = {}
    for source, target in kinds.edges:
        if target in skipped:
            into.setdefault(target, []).append(source)
    found = Operations()
    for node, label in kinds.labels.items():
        if node not in leaves and node not in skipped:
            found.names[node] = label
    known = leaves | set(found.names)
    for source, target in kinds.edges:
        for start in into.get(source, []) if source in skipped else [source]:
            if start in known and target in known:
                found.edges[start, target] = None
    return found


class _Statements:
    """The statements of dot source that torchviz wrote: its nodes are identities, so they need no unquoting."""

    def __init__(self, body: Sequence[str]) -> None:
        self.labels: dict[int, str] = {}
        self.edges: list[tuple[int, int]] = []
        for statement in body:
            match = _STATEMENT.match(statement)
            if match is None:
                continue
            node, attributes = int(match["node"]), match["attributes"]
            if match["target"] is not None:
                if "dir=none" not in attributes and "style=dotted" not in attributes:
                    self.edges.append((node, int(match["target"])))
            elif "fillcolor=" not in attributes and (label := _LABEL.search(attributes)):
                self.labels.setdefault(node, label["label"])


def _make_dot() -> Any:
    try:
        from torchviz import make_dot
    except ImportError as error:  # for one, it needs distutils, which Python 3.12 gets from setuptools only
        raise UsageError(
            f"torchviz cannot be imported ({error}); install it with `pip install 'ddpcheck[graph]'`, or pass "
            "--detail modules"
        ) from error
    return make_dot


@contextlib.contextmanager
def _recursion_limit(limit: int) -> Iterator[None]:
    """Let Python functions call each other deeper; that takes heap and no C stack since Python 3.11."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, before))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
