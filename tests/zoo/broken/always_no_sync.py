"""DDP502 or DDP301: forward always runs under `no_sync`, so nothing is ever averaged."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

EXPECT = {"code": ["DDP502", "DDP301"], "subjects": [], "ranks": [], "severity": "error"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
        prediction = model(batch)
    return (prediction[:, 0] - batch.sum(1)).square().mean()
