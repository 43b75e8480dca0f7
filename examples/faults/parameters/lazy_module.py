"""A lazy module wrapped before its first forward.

DDP needs the size of every parameter to broadcast it and to put it into a bucket.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP110", "subjects": ["2.weight", "2.bias"], "ranks": [], "severity": "error"}


def build(*, dry_run: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LazyLinear(1))
    if dry_run:
        model(torch.zeros(1, 8))
    return model


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: build(dry_run=False), batch=batch, loss=loss)
fixed = Recipe(model=lambda: build(dry_run=True), batch=batch, loss=loss)
