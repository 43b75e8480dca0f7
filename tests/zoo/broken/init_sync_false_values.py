"""DDP208: `init_sync=False`, and every rank draws its own weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXPECT = {"code": "DDP208", "subjects": [], "ranks": [1], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


ddp_kwargs = {"init_sync": False}


def model() -> nn.Module:
    torch.manual_seed(rank())
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
