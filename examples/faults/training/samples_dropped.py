"""The shards leave samples out.

What no rank holds is never trained on, in every step and epoch alike.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP519",
    "subjects": ["shard"],
    "ranks": [],
    "severity": "warning",
    "cause": "2 of 12 samples of the global batch are on no rank",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def without_remainder(batch: Tensor, rank: int, world_size: int) -> Tensor:
    size = 5
    return batch[rank * size : (rank + 1) * size]


def own_part(batch: Tensor, rank: int, world_size: int) -> Tensor:
    return batch[rank::world_size]


broken = Recipe(model=model, batch=batch, loss=loss, shard=without_remainder)
fixed = Recipe(model=model, batch=batch, loss=loss, shard=own_part)
