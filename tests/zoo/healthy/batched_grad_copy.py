"""Gradients are copied into DDP's buckets all at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ddp_kwargs = {"batched_grad_copy": True}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
