"""DDP205: the convolution is channels-last on rank 1 only."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXPECT = {"code": "DDP205", "subjects": ["0.weight"], "ranks": [1], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def model() -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 1))
    return layers.to(memory_format=torch.channels_last) if rank() == 1 else layers


def batch(step: int) -> Tensor:
    return torch.randn(12, 2, 6, 6, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.mean((1, 2, 3))).square().mean()
