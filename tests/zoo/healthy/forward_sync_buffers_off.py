"""Buffers are not synchronised before forward, and there is nothing in them that moves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ddp_kwargs = {"forward_sync_buffers": False}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
