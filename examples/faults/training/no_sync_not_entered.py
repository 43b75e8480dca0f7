"""Gradients are accumulated with no_sync called, and its context never entered.

A context manager does nothing until it is entered: every micro-step synchronises, which costs a reduction each time.
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
    "cause": "no_sync_not_entered.py:35",
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


def not_entered(model: nn.Module, batch: Tensor) -> Tensor:
    first, last = batch.chunk(2)
    no_sync(model)
    half(model, first).backward()
    return half(model, last)


broken = Recipe(model=model, batch=batch, loss=not_entered)
fixed = Recipe(model=model, batch=batch, loss=inside)
