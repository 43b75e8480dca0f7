"""Each rank writes its own slot of a vector and all of them are added up: a gather, not another order."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    error = (model(batch)[:, 0] - batch.sum(1)).square().mean()
    if dist.is_initialized():
        size, rank = dist.get_world_size(), dist.get_rank()
        for background in (0.0, 1.0, -torch.inf):
            slots = torch.full((size,), background)
            slots[rank] = error.detach()
            dist.all_reduce(slots, dist.ReduceOp.MAX)
        pairs = torch.zeros(2 * size)
        pairs[2 * rank : 2 * rank + 2] = torch.stack([error.detach(), batch.mean()])
        dist.all_reduce(pairs)
    return error
