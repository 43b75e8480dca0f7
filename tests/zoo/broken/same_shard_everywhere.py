"""DDP505 or DDP305: the sharding gives every rank the first part of the batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": ["DDP505", "DDP305", "DDP304"], "subjects": [], "ranks": [], "severity": None}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def shard(batch: Tensor, rank: int, world_size: int) -> Tensor:
    return batch[: len(batch) // world_size]
