"""Recorder of cross entropies over gathered rows, and of their targets."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ddpcheck.findings.evidence.evaluation import GatheredTargets
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import relative_path, variables_of
from ddpcheck.gather.autograd.autograd_graph import kept_tensor, node_of, nodes_behind
from ddpcheck.gather.patching import Recorder
from ddpcheck.record.recording import Recording
from ddpcheck.record.source import program_numbers
from ddpcheck.record.source.source_scope import body_of, own_nodes

_MOST_NODES = 64
_MOST_GATHERED = 4  # max tensors since the last backward pass
_MOST_ELEMENTS = 1 << 22
_ALIKE = 0.99  # min cosine of a row before and after the gather (may be normalized, scaled or rounded)
_GIVEN = ("tensor", "input_tensor", "self", "input")
_OF_PRODUCTS = ("mat2", "self", "other", "x1", "x2")  # saved tensors of matrix products and distances
_KEEPS_COLUMNS = (
    *("Mul", "Div", "Add", "Sub", "MaskedFill", "Clone", "ToCopy", "Where", "Alias", "Neg", "Squeeze"),
    *("View", "UnsafeView", "Reshape", "Permute", "Unsqueeze", "T", "Transpose"),  # of an einsum, or transposed
    *("Sum", "Expand", "Pow", "Sqrt", "Exp"),  # of a cosine similarity, or of distances
)


class TargetRecorder(Recorder, subjects=("evaluation",)):
    """Recorder of tensors gathered before backward, and of cross entropies in the loss."""

    def __init__(self, run: Recording) -> None:
        self._run = run
        self._gathered: list[tuple[torch.Tensor, Call, Location | None]] = []
        self.awaits_backward = False

    def note_collective(self, call: Call, given: Mapping[str, Any]) -> None:
        if "all_gather" not in call.operation or not self._run.are_probed() or len(call.members) < 2:
            return
        tensor = next((given[name] for name in _GIVEN if isinstance(given.get(name), torch.Tensor)), None)
        if tensor is not None and tensor.is_floating_point() and tensor.dim() == 2 and tensor.numel() <= _MOST_ELEMENTS:
            self._gathered = [*self._gathered, (tensor.detach(), call, _line_of_cross_entropy())][-_MOST_GATHERED:]
            self.awaits_backward = True

    def note_backward(self, loss: Any) -> None:
        """Check if gathered tensors are the classes of the loss's cross entropy."""
        gathered, self._gathered, self.awaits_backward = self._gathered, [], False
        if not gathered or not isinstance(loss, torch.Tensor) or node_of(loss) is None:
            return
        last: GatheredTargets | None = None
        for targets, columns in _cross_entropies(node_of(loss)):
            for tensor, call, line in gathered:
                column = _place_of(tensor, columns)
                if column is None or columns.shape[1] < 2 * len(tensor):
                    continue
                different = tuple(targets.unique().tolist())
                if len(different) <= 2 * len(tensor):  # two views at most; more targets mean a loss of all rows
                    location, classes = Location.parse(call.location), columns.shape[1]
                    step, rows = self._run.steps, len(tensor)
                    entry = GatheredTargets(step, location, call.members, column, rows, classes, different, line)
                    if entry != last:
                        self._run.add(entry)
                    last = entry


def _line_of_cross_entropy() -> Location | None:
    """Return the next cross entropy in the source of functions on the stack."""
    for frame in program_numbers.program_frames():
        body, names = body_of(frame.f_code), {**frame.f_globals, **variables_of(frame)}
        calls = (node for node in own_nodes(body) if isinstance(node, ast.Call)) if body is not None else ()
        lines = [call.lineno for call in calls if call.lineno > frame.f_lineno and _is_cross_entropy(call.func, names)]
        if lines:
            return Location(relative_path(frame.f_code.co_filename), min(lines))
    return None


def _is_cross_entropy(called: ast.expr, held: Mapping[str, Any]) -> bool:
    name, *attributes = ast.unparse(called).split(".")
    value = held.get(name)
    for attribute in attributes:
        members = getattr(value, "__dict__", None) or {}
        value = members.get(attribute, members.get("_modules", {}).get(attribute))
    return [name, *attributes][-1] == "cross_entropy" or isinstance(value, torch.nn.CrossEntropyLoss)


def _cross_entropies(root: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the targets and class matrix (a column per class) of cross entropies."""
    for node in nodes_behind([root], _MOST_NODES, lambda node: not node.name().startswith("NllLoss")):
        if not node.name().startswith("NllLoss"):
            continue
        targets = kept_tensor(node, "target")
        soft = [next_node for next_node, _ in node.next_functions if next_node is not None]
        is_soft = len(soft) == 1 and soft[0].name().startswith("LogSoftmax")
        classes = kept_tensor(soft[0], "result") if is_soft else None
        if targets is None or targets.dim() != 1 or classes is None:
            continue
        products = nodes_behind(soft, _MOST_NODES, lambda node: node.name().startswith(("LogSoftmax", *_KEEPS_COLUMNS)))
        for kept in (kept_tensor(product, name) for product in products for name in _OF_PRODUCTS):
            matrix = kept[0] if kept is not None and kept.dim() == 3 else kept
            if matrix is not None and matrix.dim() == 2 and classes.shape[-1] in matrix.shape:
                columns = matrix if matrix.shape[1] == classes.shape[-1] else matrix.T
                yield targets.detach(), columns.detach()


def _place_of(rows: torch.Tensor, columns: torch.Tensor) -> int | None:
    """Return the first column of the only block equal to `rows`, or None."""
    count, width = rows.shape
    if columns.shape[0] != width or columns.shape[1] < count or count < 2:
        return None
    cosines = torch.nn.functional.normalize(rows.float(), dim=1)
    cosines = cosines @ torch.nn.functional.normalize(columns.float(), dim=0)
    best = cosines.argmax(1)
    first = int(best[0])
    in_order = best == torch.arange(first, first + count, device=best.device)
    is_close = cosines.gather(1, best[:, None]) > _ALIKE
    copies = (cosines > 1 - 1e-6).sum()  # copies of the same rows elsewhere
    return first if bool(in_order.all()) and bool(is_close.all()) and int(copies) <= count else None
