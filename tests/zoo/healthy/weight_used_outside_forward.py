"""A weight penalty in the loss reads parameters outside forward; without find_unused_parameters DDP gets it right."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    inner = getattr(model, "module", model)
    penalty = sum(parameter.square().sum() for parameter in inner[0].parameters())
    return (model(batch)[:, 0] - batch.sum(1)).square().mean() + 0.01 * penalty
