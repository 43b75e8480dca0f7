"""DDP110: a lazy layer is wrapped before a forward gave it a shape."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP110", "subjects": ["1.weight", "1.bias"], "ranks": [], "severity": "error"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
