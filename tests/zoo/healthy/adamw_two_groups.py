"""AdamW with two parameter groups: its state and its options are the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    chosen = list(parameters)
    plain = [parameter for parameter in chosen if parameter.ndim < 2]
    decayed = [parameter for parameter in chosen if parameter.ndim >= 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=0.01
    )
