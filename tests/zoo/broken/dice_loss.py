"""DDP304: a Dice loss over the whole batch is a ratio of sums, and the mean of two ratios is another number."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": ["DDP304", "DDP305"], "subjects": [], "ranks": [], "severity": "warning"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    predicted, target = model(batch)[:, 0].sigmoid(), (batch.sum(1) > 0).to(batch.dtype)
    return 1 - 2 * (predicted * target).sum() / (predicted.sum() + target.sum())
