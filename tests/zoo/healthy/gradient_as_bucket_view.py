"""Gradients that are views into DDP's buckets, several of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ddp_kwargs = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
