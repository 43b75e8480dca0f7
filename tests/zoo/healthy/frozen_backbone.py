"""A backbone that does not require gradients, under a head that does."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def model() -> nn.Module:
    backbone = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()).requires_grad_(False)
    return nn.Sequential(backbone, nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
