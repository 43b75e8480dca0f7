"""Weight normalisation as a parametrisation: the weight that is used is computed from two parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


def model() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.Tanh(), weight_norm(nn.Linear(8, 1), dim=None))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
