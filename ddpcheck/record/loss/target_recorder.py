"""Cross entropies over gathered rows: where a rank's own rows lie among the classes, and what the targets say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ddpcheck.findings.evidence.evaluation import GatheredTargets
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Location
from ddpcheck.gather.autograd.autograd_graph import kept_tensor, nodes_behind
from ddpcheck.record.recording import Recording

_MOST_NODES = 64
_MOST_GATHERED = 4  # tensors since the last backward pass
_MOST_ELEMENTS = 1 << 22
_ALIKE = 0.99  # cosine of a row before it is gathered and after: it may be normalised, scaled or rounded in between
_GIVEN = ("tensor", "input_tensor", "self", "input")
_KEEPS_COLUMNS = (
    *("Mul", "Div", "Add", "Sub", "MaskedFill", "Clone", "ToCopy", "Where", "Alias", "Neg", "Squeeze"),
    *("View", "UnsafeView", "Reshape", "Permute", "Unsqueeze"),  # of a product by einsum
)


class TargetRecorder:
    """Follows what is gathered before a backward pass, and the cross entropies that it begins from."""

    def __init__(self, run: Recording) -> None:
        self._run = run
        self._gathered: list[tuple[torch.Tensor, Call]] = []
        self.awaits_backward = False

    def note_collective(self, call: Call, given: Mapping[str, Any]) -> None:
        """A collective is about to be made."""
        if "all_gather" not in call.operation or not self._run.are_probed() or len(call.members) < 2:
            return
        tensor = next((given[name] for name in _GIVEN if isinstance(given.get(name), torch.Tensor)), None)
        if tensor is not None and tensor.is_floating_point() and tensor.dim() == 2 and tensor.numel() <= _MOST_ELEMENTS:
            self._gathered = [*self._gathered, (tensor.detach(), call)][-_MOST_GATHERED:]
            self.awaits_backward = True

    def note_backward(self, loss: Any) -> None:
        """A backward pass of the script begins: are what was gathered the classes of its cross entropy?"""
        gathered, self._gathered, self.awaits_backward = self._gathered, [], False
        if not gathered or not isinstance(loss, torch.Tensor) or loss.grad_fn is None:
            return
        for targets, columns in _cross_entropies(loss.grad_fn):
            for tensor, call in gathered:
                own = _place_of(tensor, columns)
                if own is None or columns.shape[1] < 2 * len(tensor):
                    continue
                different = tuple(targets.unique().tolist())
                if len(different) <= 2 * len(tensor):  # of two views; more are a loss of all rows
                    where, classes = Location.parse(call.location), columns.shape[1]
                    step, rows = self._run.steps, len(tensor)
                    self._run.add(GatheredTargets(step, where, call.members, own, rows, classes, different))


def _cross_entropies(root: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Targets, and the matrix whose columns are the classes, of each cross entropy of products of rows."""
    for node in nodes_behind([root], _MOST_NODES, lambda node: not node.name().startswith("NllLoss")):
        if not node.name().startswith("NllLoss"):
            continue
        targets = kept_tensor(node, "target")
        soft = [after for after, _ in node.next_functions if after is not None]
        if targets is None or targets.dim() != 1 or len(soft) != 1:
            continue
        if not soft[0].name().startswith("LogSoftmax"):
            continue
        for product in nodes_behind(soft, _MOST_NODES, _keeps_columns):
            if product.name().startswith(("Mm", "Addmm", "Bmm")):
                columns, classes = kept_tensor(product, "mat2"), kept_tensor(soft[0], "result")
                columns = columns[0] if columns is not None and columns.dim() == 3 else columns
                if columns is not None and classes is not None:
                    if columns.dim() == 2 and columns.shape[1] == classes.shape[-1]:
                        yield targets.detach(), columns.detach()


def _keeps_columns(node: Any) -> bool:
    return bool(node.name().startswith(("LogSoftmax", *_KEEPS_COLUMNS)))


def _place_of(rows: torch.Tensor, columns: torch.Tensor) -> int | None:
    """At which column the rows begin, one after the other; none where they are not there, or more than once."""
    count, width = rows.shape
    if columns.shape[0] != width or columns.shape[1] < count or count < 2:
        return None
    alike = torch.nn.functional.normalize(rows.float(), dim=1)
    alike = alike @ torch.nn.functional.normalize(columns.float(), dim=0)
    best = alike.argmax(1)
    first = int(best[0])
    in_order = best == torch.arange(first, first + count, device=best.device)
    same = alike.gather(1, best[:, None]) > _ALIKE
    others = (alike > 1 - 1e-6).sum()  # copies of the same rows elsewhere
    return first if bool(in_order.all()) and bool(same.all()) and int(others) <= count else None
