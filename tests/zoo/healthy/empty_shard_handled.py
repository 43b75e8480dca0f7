"""In one step the last rank has no samples, and the loss knows what to do: it divides by the global count."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def shard(batch: Any, rank: int, world_size: int) -> Tensor:
    parts: tuple[Tensor, ...] = batch.tensor_split(world_size - 1 if batch[0, 0] > 0 and world_size > 1 else world_size)
    return parts[rank] if rank < len(parts) else batch[:0]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    count = torch.tensor(float(len(batch)))
    world_size = 1
    if dist.is_initialized():
        dist.all_reduce(count)
        world_size = dist.get_world_size()
    return (model(batch)[:, 0] - batch.sum(1)).square().sum() * world_size / count
