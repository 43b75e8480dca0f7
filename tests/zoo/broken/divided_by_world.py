"""DDP303: the loss is divided by the world size, which DDP does once more."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXPECT = {"code": ["DDP303", "DDP305"], "subjects": [], "ranks": [], "severity": "error"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return (model(batch)[:, 0] - batch.sum(1)).square().mean() / world_size
