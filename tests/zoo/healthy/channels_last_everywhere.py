"""Convolutions in channels-last layout on every rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def model() -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 1))
    return layers.to(memory_format=torch.channels_last)


def batch(step: int) -> Tensor:
    return torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    prediction = model(batch.contiguous(memory_format=torch.channels_last))
    return (prediction[:, 0] - batch.mean((1, 2, 3))).square().mean()
