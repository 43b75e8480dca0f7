"""DDP109: `find_unused_parameters=True`, and every parameter contributes in every step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP109", "subjects": [], "ranks": [], "severity": "note"}


ddp_kwargs = {"find_unused_parameters": True}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
