"""A model that TorchScript has compiled as a whole: it refuses hooks by the methods that register them."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn


def model() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still in many models
        return torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
