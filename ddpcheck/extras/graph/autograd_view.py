"""Draw the autograd graph of a loss with torchviz, with marked parameters."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch

from ddpcheck.extras.graph.drawing_data import Mark, colour
from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.evidence.steps import PathEnd
from ddpcheck.findings.rules import RULES
from ddpcheck.gather.autograd.autograd_graph import LossGraph

MOST_NODES = 3_000  # Graphviz needs minutes for larger graphs
_FRAMES_PER_NODE = 4  # Python frames per node in the recursion of torchviz
_STACK = 512 << 20  # bytes of address space; only the used part takes memory
_STOP = {"shape": "octagon", "color": "#B00020", "fillcolor": "#FFF1F0", "fontcolor": "#B00020"}
_ADDRESS = re.compile(r"\b\d{9,}\b")


def draw_autograd(
    losses: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    marks: Mapping[str, Mark],
    ends: Mapping[str, PathEnd],
) -> str:
    """Return dot source of the autograd graph of losses.

    Args:
        losses: Scalar losses, by name.
        tensors: Parameters and other trained leaf tensors, by name.
        marks: Marks of tensors with findings, by name; tensors outside the graph are drawn beside the graph.
        ends: Ends of the autograd paths of tensors, by name.

    Raises:
        UsageError: The graph has more than `MOST_NODES` nodes.
    """
    from torchviz import make_dot

    count = len(LossGraph(losses.values(), limit=sys.maxsize).nodes)
    if count > MOST_NODES:
        raise UsageError(
            f"the autograd graph of the loss has {count:,} nodes, and --view autograd draws {MOST_NODES:,}: use --view "
            "modules, or a recipe with a smaller model"
        )
    graph = _with_deep_stack(
        lambda: make_dot(tuple(losses.values()), params={**tensors, **losses}), _FRAMES_PER_NODE * count
    )
    stops: dict[str, str] = {}
    for name, (code, where) in marks.items():
        tensor = tensors.get(name)
        key, shape = (name, "") if tensor is None else (str(id(tensor)), str(tuple(tensor.shape)))
        label = "\n".join(filter(None, (name, shape, f"{code} {RULES[code].name}", where)))
        graph.node(key, label, **colour(code))
        if end := ends.get(name):
            label = f"{end.reason}\nat {end.location}" if end.location else end.reason
            if label not in stops:
                stops[label] = f"stop{len(stops)}"
                graph.node(stops[label], label, **_STOP)
            graph.edge(key, stops[label], style="dashed")
    numbers: dict[str, str] = {}
    return _ADDRESS.sub(lambda match: numbers.setdefault(match[0], f"n{len(numbers)}"), str(graph.source))


def _with_deep_stack(function: Any, frames: int) -> Any:
    """Call a recursive function in a thread with room for `frames` frames."""
    results: list[Any] = []
    limit, size = sys.getrecursionlimit(), threading.stack_size(_STACK)
    sys.setrecursionlimit(limit + frames)
    try:
        thread = threading.Thread(target=lambda: results.append(function()))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(size)
        sys.setrecursionlimit(limit)
    return results[0]
