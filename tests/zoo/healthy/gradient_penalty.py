"""A penalty on the gradient with respect to the input: `autograd.grad` inside the loss, and a double backward."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    x = batch.clone().requires_grad_()
    prediction = model(x)[:, 0]
    (slope,) = torch.autograd.grad(prediction.sum(), x, create_graph=True)
    return (prediction - batch.sum(1)).square().mean() + (slope.norm(dim=1) - 1).square().mean()
