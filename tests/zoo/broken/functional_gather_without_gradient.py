"""DDP309: features are gathered through a functional collective, detached: no gradient comes back."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

EXPECT = {"code": "DDP309", "subjects": ["all_gather_tensor"], "ranks": [], "severity": "error"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    output = model(batch)[:, 0]
    everyone = output
    if dist.is_initialized():
        everyone = functional.all_gather_tensor(output.detach(), 0, dist.group.WORLD)
        everyone = everyone.wait() if hasattr(everyone, "wait") else everyone
    return (output - everyone.mean() - batch.sum(1)).square().mean()
