"""Gradients are accumulated with no_sync around backward, and forward before it.

no_sync takes effect in forward: every micro-step synchronises all the same, which costs a reduction each time.
"""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP502",
    "subjects": ["no_sync"],
    "ranks": [],
    "severity": "warning",
    "cause": "no_sync_around_backward_only.py:48",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def half(model: nn.Module, part: Tensor) -> Tensor:
    return (model(part)[:, 0] - part.sum(1)).square().mean() / 2


def no_sync(model: nn.Module):
    return model.no_sync() if hasattr(model, "no_sync") else nullcontext()


def inside(model: nn.Module, batch: Tensor) -> Tensor:
    first, last = batch.chunk(2)
    with no_sync(model):
        half(model, first).backward()
    return half(model, last)


def outside(model: nn.Module, batch: Tensor) -> Tensor:
    first, last = batch.chunk(2)
    value = half(model, first)
    with no_sync(model):
        value.backward()
    return half(model, last)


broken = Recipe(model=model, batch=batch, loss=outside)
fixed = Recipe(model=model, batch=batch, loss=inside)
