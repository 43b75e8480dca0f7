"""The tensors in what a forward pass has returned, in objects of the user's classes too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ddpcheck.recipe.pytree import tree_leaves

_DEPTH = 3  # of objects in objects


def differentiable_tensors(output: Any) -> list[torch.Tensor]:
    """The tensors in `output` through which a gradient can come."""
    if isinstance(output, torch.Tensor):  # as a rule: no need to look into it
        return [] if output.grad_fn is None else [output]
    return [tensor for tensor in _tensors(output) if tensor.grad_fn is not None]


def trainable_leaves(output: Any) -> list[torch.Tensor]:
    """The tensors in `output` that require grad and that nothing has computed."""
    if isinstance(output, torch.Tensor):
        return [output] if output.requires_grad and output.grad_fn is None else []
    return [tensor for tensor in _tensors(output) if tensor.requires_grad and tensor.grad_fn is None]


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    pending = [(output, 0)]
    while pending:
        value, depth = pending.pop()
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield leaf
            elif depth < _DEPTH and not isinstance(leaf, nn.Module | type):
                with contextlib.suppress(Exception):  # no attributes, or an object that does not like to be asked
                    pending.append((list(vars(leaf).values()), depth + 1))
