"""Parameters in float32, products in bfloat16 under autocast."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast(batch.device.type, torch.bfloat16):
        prediction = model(batch)
    return (prediction.float()[:, 0] - batch.sum(1)).square().mean()
