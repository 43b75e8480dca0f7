"""Targets (labels, values, tokens) that torch's losses save for backward."""

from __future__ import annotations

from typing import Any

import torch

from ddpcheck.findings.evidence.script import LossTarget
from ddpcheck.gather.autograd.autograd_graph import kept_tensor, node_of, nodes_behind
from ddpcheck.gather.state.fingerprints import fingerprint

_MOST_NODES = 32
_MOST_TARGETS = 4
_MOST_COUNTED = 1 << 12  # max elements for the entropy estimate
_GOES_ON = ("Mul", "Div", "Neg", "Add", "Sub", "Sum", "Mean", "View", "Reshape", "Squeeze", "Unsqueeze", "Clone")


def targets_of(loss: torch.Tensor) -> tuple[LossTarget, ...]:
    """Return the targets of a loss that combines torch's losses arithmetically."""
    targets = []
    nodes = filter(_has_target, nodes_behind([node_of(loss)], _MOST_NODES, _is_arithmetic))
    for target in (kept_tensor(node, "target") for node in nodes):
        if type(target) is torch.Tensor and target.layout == torch.strided and target.dim() and not target.is_complex():
            if not target.requires_grad and target.numel() > 1:
                targets.append(LossTarget(fingerprint(target), len(target), target.numel(), _bits(target.detach())))
    return tuple(targets[:_MOST_TARGETS])


def _is_arithmetic(node: Any) -> bool:
    return not _has_target(node) and bool(node.name().startswith(_GOES_ON))


def _has_target(node: Any) -> bool:
    return hasattr(node, "_raw_saved_target")


def _bits(target: torch.Tensor) -> float:
    """Return the entropy in bits; 0 for sorted values or contiguous equal values."""
    values = target.flatten()
    values = values[:: max(1, len(values) // _MOST_COUNTED)]
    steps = values[1:].double() - values[:-1].double()
    if bool((steps >= 0).all()) or bool((steps <= 0).all()) or not bool(steps.isfinite().all()):
        return 0.0
    _, counts = values.unique(return_counts=True)
    different, blocks = len(counts), 1 + int((steps != 0).sum())
    if blocks == different < len(values):
        return 0.0
    return -float((counts / len(values)).log2().mul(counts).sum())
