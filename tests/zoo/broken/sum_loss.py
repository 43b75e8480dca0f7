"""DDP305: the loss is a sum over the samples, so DDP's average is 1/W of what a single process has."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

EXPECT = {"code": ["DDP305", "DDP303"], "subjects": [], "ranks": [], "severity": "error"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().sum()


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.001)
