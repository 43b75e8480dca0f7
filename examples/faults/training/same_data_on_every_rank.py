"""Every rank trains on the same part of the batch.

The mean of equal gradients is the same gradient: all ranks do the work of one, and the rest of the data is never seen.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP505",
    "subjects": ["shard"],
    "ranks": [],
    "severity": "error",
    "cause": "6 samples on rank 1 are on rank 0 too",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def first_part(batch: Tensor, rank: int, world_size: int) -> Tensor:
    return batch[: len(batch) // world_size]


def own_part(batch: Tensor, rank: int, world_size: int) -> Tensor:
    return batch[rank::world_size]


broken = Recipe(model=model, batch=batch, loss=loss, shard=first_part)
fixed = Recipe(model=model, batch=batch, loss=loss, shard=own_part)
