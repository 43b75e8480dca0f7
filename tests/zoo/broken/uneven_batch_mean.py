"""DDP305: 11 samples over 2 ranks, each of which takes its own mean: those of the smaller shard weigh more."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP305", "subjects": [], "ranks": [], "severity": "error"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(11, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
