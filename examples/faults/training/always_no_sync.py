"""Every forward pass runs under no_sync.

Gradients are never averaged: every rank trains a model of its own, and nothing is raised.
"""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP502",
    "subjects": ["no_sync"],
    "ranks": [],
    "severity": "error",
    "cause": "always_no_sync.py:35",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def never_synchronised(model: nn.Module, batch: Tensor) -> Tensor:
    with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
        return loss(model, batch)


broken = Recipe(model=model, batch=batch, loss=never_synchronised)
fixed = Recipe(model=model, batch=batch, loss=loss)
