"""Where a gradient that arrives as zeros became zero: a backward pass in which every node of the graph is watched.

It is only paid for when a parameter's gradient is zero in every step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ddpcheck.findings.evidence.parameters import PathEnd
from ddpcheck.findings.exception_origin import for_target
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import is_user_file, relative_path
from ddpcheck.gather.autograd.autograd_graph import WALK_LIMIT, gradient_node

_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+)')


def zero_ends(forward: Callable[[], torch.Tensor], leaves: Mapping[str, torch.Tensor]) -> dict[str, PathEnd]:
    """The operations that turn the gradients of `leaves` into zeros: nonzero ones come to them, zeros leave.

    Args:
        forward: Computes the loss; run once, and backward through it.
        leaves: By name; those whose gradient was zero all the way from the loss are left out of the answer.
    """
    with torch.autograd.set_detect_anomaly(True, check_nan=False):  # notes the line at which each node was made
        loss = forward()
    watch = _Watch(loss)
    _backward(loss)
    ends = {}
    for name, leaf in leaves.items():
        zeroing_nodes = list(watch.zeroing_nodes(leaf))
        if zeroing_nodes:
            ends[name] = PathEnd("zero", operation_of(zeroing_nodes[0].name()), _line_of(zeroing_nodes[0]))
    watch.release()
    return ends


@for_target
def _backward(loss: torch.Tensor) -> None:
    loss.backward()


class _Watch:
    """Hooks on every node behind a loss, up to a limit, that note which gradients are zero."""

    def __init__(self, loss: torch.Tensor) -> None:
        self._parents: dict[Any, list[tuple[Any, int]]] = {}
        self._alive: dict[Any, bool] = {}  # node -> whether anything but zeros came to it
        self._passed: dict[Any, tuple[bool, ...]] = {}  # node -> for each input, whether anything but zeros left
        self._hooks = []
        pending, seen = [loss.grad_fn], {loss.grad_fn}
        while pending:
            node = pending.pop()
            if node is None:
                continue
            self._hooks.append(node.register_hook(self._hook(node)))
            for index, (following, _) in enumerate(node.next_functions):
                if following is not None:
                    self._parents.setdefault(following, []).append((node, index))
                    if following not in seen and len(seen) < WALK_LIMIT:
                        seen.add(following)
                        pending.append(following)

    def _hook(self, node: Any) -> Callable[[Any, Any], None]:
        def note(inputs: Any, outputs: Any) -> None:
            self._alive[node] = any(map(_is_alive, outputs))
            self._passed[node] = tuple(map(_is_alive, inputs))

        return note

    def zeroing_nodes(self, leaf: torch.Tensor) -> Iterator[Any]:
        """The nodes nearest to `leaf` to which a gradient came and which passed on none in its direction."""
        target = gradient_node(leaf)
        pending, seen = [target], {target}
        while pending:
            for node, index in self._parents.get(pending.pop(), ()):
                passed = self._passed.get(node, ())
                if self._alive.get(node, False) and not any(passed[index : index + 1]):
                    yield node
                elif node not in seen:
                    seen.add(node)
                    pending.append(node)

    def release(self) -> None:
        """Let go of the graph."""
        for hook in self._hooks:
            hook.remove()
        self._parents.clear()
        self._alive.clear()
        self._passed.clear()


def _is_alive(gradient: object) -> bool:
    return isinstance(gradient, torch.Tensor) and bool(gradient.count_nonzero())


def operation_of(node_name: str) -> str:
    """The operation whose backward a graph node is: "mul()" for "MulBackward0"."""
    name = re.sub(r"Backward\d*$", "", node_name)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower() + "()"


def _line_of(node: Any) -> Location | None:
    """The innermost line of the user's code that made `node`, from what anomaly detection has noted."""
    for frame in reversed(node.metadata.get("traceback_", ())):
        found = _FRAME.search(frame)
        if found and is_user_file(found["path"]):
            return Location(relative_path(found["path"]), int(found["line"]))
    return None
