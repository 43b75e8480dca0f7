"""DDP307: the loss is multiplied by zero; nothing is left to compare."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP307", "subjects": [], "ranks": [], "severity": "error", "also": ["DDP107"]}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return 0.0 * (model(batch)[:, 0] - batch.sum(1)).square().mean()
