"""DDP310: a hook clips every local gradient to norm 0.5 before the average is taken, instead of after."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP310", "subjects": [], "ranks": [], "severity": "error"}


def model() -> nn.Module:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    for parameter in layers.parameters():
        parameter.register_hook(lambda gradient: gradient * (0.5 / gradient.norm()).clamp(max=1))
    return layers


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
