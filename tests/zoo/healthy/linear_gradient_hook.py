"""Hooks that are linear in the gradient (a layer with its learning rate halved): averaging commutes with them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def model() -> nn.Module:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    for parameter in layers[0].parameters():
        parameter.register_hook(lambda gradient: 0.5 * gradient)
    return layers


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
