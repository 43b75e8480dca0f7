"""Lazy layers that a first forward gave their shape before they are wrapped."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def model() -> nn.Module:
    layers = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))
    layers(torch.zeros(1, 8))
    return layers


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
