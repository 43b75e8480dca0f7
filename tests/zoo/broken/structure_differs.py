"""DDP222: another activation on rank 1, with the same parameters."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXPECT = {"code": "DDP222", "subjects": [], "ranks": [1], "severity": "error", "also": ["DDP304"]}


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU() if rank() == 1 else nn.ReLU(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
