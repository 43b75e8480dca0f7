"""The shards of the ranks overlap.

Samples that two ranks hold count twice in the average, and so weigh more than the others.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP505",
    "subjects": ["shard"],
    "ranks": [],
    "severity": "error",
    "cause": "1 sample on rank 1 is on rank 0 too",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def off_by_one(batch: Tensor, rank: int, world_size: int) -> Tensor:
    size = len(batch) // world_size
    return batch[max(rank * size - 1, 0) : (rank + 1) * size]


def own_part(batch: Tensor, rank: int, world_size: int) -> Tensor:
    size = len(batch) // world_size
    return batch[rank * size : (rank + 1) * size]


broken = Recipe(model=model, batch=batch, loss=loss, shard=off_by_one)
fixed = Recipe(model=model, batch=batch, loss=loss, shard=own_part)
