"""DDP501: only rank 1 goes past the wrapper; rank 0 waits for its gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXPECT = {"code": ["DDP501", "DDP402"], "subjects": [], "ranks": [1], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    inner = getattr(model, "module", model)
    chosen = inner if rank() == 1 else model
    return (chosen(batch)[:, 0] - batch.sum(1)).square().mean()
