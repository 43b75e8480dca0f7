"""Weight of each target of a micro-batch in the loss, measured in backward.

The loss of a classifier or language model is a weighted sum over targets (tokens, pixels, samples) of their cross
entropy. With weight w, the gradient of a target's log-probabilities is -w at its class, and the gradient of its logits
is `w * (softmax(logits) - onehot)`. Both are measured: at each `log_softmax` in the graph of the forward output, and at
the forward output itself, if the loss is computed outside. Any other gradient is ignored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

from ddpcheck.gather.autograd.autograd_graph import LossGraph, node_of
from ddpcheck.gather.autograd.loss_terms import nearest_leaf_node
from ddpcheck.gather.patching import Recorder
from ddpcheck.gather.state.fingerprints import version_counter
from ddpcheck.recipe.pytree import tree_leaves
from ddpcheck.record.recording import remove_hooks
from ddpcheck.stream.rank_report import MicroBatch, is_probed

_STEPS_KEPT = 4
_MOST_PER_STEP = 256  # max micro-batches
_MOST_HEADS = 4
_MOST_PARAMS = 8  # max parameters checked for an optimizer step
_MOST_NODES = 2000  # max graph nodes: the loss is close to the root
_MOST_ELEMENTS = 1 << 22  # max elements of logits kept for backward; larger logits are sampled by row
_LEAST_ROWS = 16
_TOLERANCE = 0.02  # half-precision gradients have 8 significant bits
_Measure = Callable[[torch.Tensor], torch.Tensor]
_Measured = tuple[int, int, str, int, int, torch.Tensor]  # fields of a MicroBatch, the last three as a tensor


class MicroBatches(Recorder, subjects=("loss",)):
    """Recorder of a wrapper's micro-batches in optimizer steps 0, 1, 2, 4, 8 ..."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._sampled_params = parameters[:: -(-len(parameters) // _MOST_PARAMS) | 1]  # odd stride: weights and biases
        self._optimizer_step = 0  # optimizer step
        self._has_reduced = False
        self._version_sum = 0
        self._has_moved = False
        self._across_reductions = False
        self._num_forwards = 0
        self._without_backward: set[int] = set()  # forward passes without a backward pass yet
        self._measured: list[_Measured] = []
        self._handles: list[Any] = []

    def forward_returned(self, step: int, output: Any) -> None:
        """Hook the `output` of a forward pass with gradients enabled."""
        if self._has_reduced:
            self._has_reduced = False
            self._across_reductions = self._is_accumulating()
            if not self._across_reductions:  # first forward of an optimizer step
                self._optimizer_step += 1
                self._num_forwards = 0
                self._without_backward.clear()
                if self._handles:
                    remove_hooks(self._handles)
        if is_probed(self._optimizer_step) and self._num_forwards < _MOST_PER_STEP:
            hooks = len(self._handles)
            with contextlib.suppress(Exception):  # unknown output type
                self._hook_output(step, self._num_forwards, output)
            if len(self._handles) > hooks:
                self._without_backward.add(self._num_forwards)
            self._num_forwards += 1

    def step_ended(self) -> None:
        self._has_reduced = True
        self._version_sum = sum(map(version_counter, self._sampled_params))

    def measured(self) -> tuple[MicroBatch, ...]:
        """Return the micro-batches of the last measured optimizer steps."""
        last_steps = sorted({measured[0] for measured in self._measured})[-_STEPS_KEPT:]
        self._measured = [measured for measured in self._measured if measured[0] in last_steps]
        return tuple(
            MicroBatch(index, step, head, position, sequences, *values.tolist())
            for index, step, head, position, sequences, values in self._measured
        )

    def close(self) -> None:
        remove_hooks(self._handles)
        self._measured.clear()

    # Optimizer steps

    def _is_accumulating(self) -> bool:
        """Return True if gradients accumulate over reductions, without an optimizer step in between.

        The result is True if no parameter has changed since the last reduction, parameters changed between earlier
        reductions, and gradients are nonzero now.
        """
        if sum(map(version_counter, self._sampled_params)) != self._version_sum:
            self._has_moved = True
            return False
        return self._has_moved and self._has_gradients()

    def _has_gradients(self) -> bool:
        grads = (parameter.grad for parameter in self._parameters if parameter.grad is not None)
        return any(bool(gradient.detach().ne(0).any()) for gradient in grads if gradient.layout == torch.strided)

    # Measuring

    def _hook_output(self, step: int, position: int, output: Any) -> None:
        tensors = _tensors(output)
        sequences = next((len(tensor) for tensor in tensors if tensor.ndim == 3), 0)
        nodes = log_softmaxes(tensors)
        for index in _with_unshared_head(nodes):
            key = step, f"log_softmax {index}", position, sequences
            self._hook_node(nodes[index], 0, key, _weights_of_log_probs)
        scores = [tensor for tensor in tensors if tensor.ndim > 1 and tensor.is_floating_point()]
        for index in _with_unshared_head([node_of(tensor) for tensor in scores]):
            key = step, f"output {index}", position, sequences
            self._hook_node(*_original_output(scores[index]), key, _SampledLogits(scores[index]))

    def _hook_node(self, node: Any, output_nr: int, key: tuple[int, str, int, int], measure: _Measure) -> None:
        """Hook a node to measure the gradient of its output; `key`: fields of `MicroBatch`."""
        index = self._optimizer_step

        def measure_gradient(grads: tuple[torch.Tensor | None, ...]) -> None:
            gradient = grads[output_nr]
            if gradient is None or gradient.ndim < 2 or index != self._optimizer_step:
                return
            values = torch.tensor([1.0, 0.0, 1.0])  # unknown weight
            self._without_backward.discard(key[2])
            is_mixed = self._without_backward or (self._across_reductions and not self._has_gradients())
            if not is_mixed:  # several forwards in one loss are not micro-batches; ignore gradients of a skipped step
                with torch.no_grad(), contextlib.suppress(Exception):
                    values = measure(gradient)
            self._measured.append((index, *key, values))

        self._handles.append(node.register_prehook(measure_gradient))


def _tensors(output: Any) -> list[torch.Tensor]:
    leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and node_of(leaf) is not None)
    return list(islice(leaves, _MOST_HEADS))


def log_softmaxes(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Return the first `log_softmax` nodes in the graph of `tensors`, at most `_MOST_HEADS`."""
    graph = LossGraph(tensors, limit=_MOST_NODES, is_end=lambda node: node.name().startswith("LogSoftmaxBackward"))
    return graph.ends[:_MOST_HEADS]


def _with_unshared_head(nodes: Sequence[Any]) -> list[int]:
    """Return indices of nodes that share their last layer (`nearest_leaf_node`) with no other node."""
    heads = [nearest_leaf_node(node) for node in nodes]
    return [index for index, head in enumerate(heads) if head is None or heads.count(head) == 1]


def _original_output(logits: torch.Tensor) -> tuple[Any, int]:
    """Return the node and output index that receive the whole gradient of `logits`.

    DDP returns copies of the forward outputs, and autocast copies in another dtype; a loss computed in forward uses the
    originals.
    """
    node: Any = node_of(logits)
    index = logits.output_nr
    while node.name() in ("ToCopyBackward0", "_DDPSinkBackward"):
        edge = node.next_functions[index if len(node.next_functions) > index else 0]
        if edge[0] is None:
            break
        node, index = edge
    return node, index


def _summary(weights: torch.Tensor, counted: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """Return [number of counted targets, common weight (0 if weights differ), number of rows]."""
    rows = torch.tensor(float(counted.numel()), device=counted.device)
    count = counted.sum().float()
    weights = weights[sampled].float()
    if not weights.numel():
        return torch.stack([count, torch.zeros_like(rows), rows])
    median = weights.median()
    is_equal = ((weights - median).abs() <= _TOLERANCE * median.abs()).all() & (median > 0) & median.isfinite()
    return torch.stack([count, torch.where(is_equal, median, torch.zeros_like(median)), rows])


def _weights_of_log_probs(gradient: torch.Tensor) -> torch.Tensor:
    """Measure target weights from log-probability gradients: -weight at the target (less if smoothed)."""
    least = _target_rows(gradient).amin(-1)
    counted = least < 0
    return _summary(-least, counted, counted)


class _SampledLogits:
    """Sampled rows of logits, kept until their gradient arrives."""

    def __init__(self, logits: torch.Tensor) -> None:
        rows = _target_rows(logits.detach())
        limit = max(_LEAST_ROWS, _MOST_ELEMENTS // max(1, rows.shape[-1]))
        self._row_indices = torch.arange(len(rows), device=rows.device)
        if len(rows) > limit:  # aperiodic sampling avoids the same position in every sequence
            golden = torch.arange(limit, dtype=torch.float64).mul(0.6180339887498949).frac()
            self._row_indices = (golden * len(rows)).long().unique().to(rows.device)
        self._sampled_rows = rows[self._row_indices]

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        rows = _target_rows(gradient)
        counted = rows.amin(-1) < 0
        grad = rows[self._row_indices].float()
        probabilities = self._sampled_rows.float().softmax(-1)
        target = grad.argmin(-1, keepdim=True)
        wrong = probabilities.scatter_add(-1, target, -torch.ones_like(grad[:, :1]))
        smooth = probabilities - 1 / probabilities.shape[-1]  # direction of label smoothing
        if probabilities.shape[-1] < 3:
            smooth = torch.zeros_like(smooth)  # the same direction as `wrong`
        direction = wrong - _coefficients(wrong, smooth) * smooth
        weights = _coefficients(grad, direction)
        residual = grad - weights * wrong
        off = (residual - _coefficients(residual, smooth) * smooth).norm(dim=-1) > _TOLERANCE * grad.norm(dim=-1)
        weights = torch.where(off, torch.full_like(weights[:, 0], torch.nan), weights[:, 0])
        return _summary(weights, counted, counted[self._row_indices])


def _coefficients(rows: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    squares = directions.square().sum(-1, keepdim=True).clamp_min(torch.finfo(directions.dtype).tiny)
    return (rows * directions).sum(-1, keepdim=True) / squares


def _target_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Reshape `tensor` to (targets, classes), from (N, classes, height, width) or (..., classes)."""
    classes_last = tensor.movedim(1, -1) if tensor.ndim > 3 else tensor
    return classes_last.reshape(-1, classes_last.shape[-1])
