"""A model in bfloat16, whose rounding is 65,536 times that of float32 and still no fault."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def model() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(8, 1)).to(torch.bfloat16)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
