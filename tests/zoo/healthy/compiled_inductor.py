"""model() compiles with inductor: dropout, whose compiled code draws other numbers, and a LayerNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def model() -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 1))
    compiled: nn.Module = torch.compile(net)
    return compiled


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
