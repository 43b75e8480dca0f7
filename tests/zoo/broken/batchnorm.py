"""DDP304: BatchNorm takes its statistics over the shard of its rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP304", "subjects": ["1"], "ranks": [], "severity": "warning", "also": ["DDP214", "DDP215"]}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
