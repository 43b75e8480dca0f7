"""The loader of one rank ends before that of the others.

Five files on rank 0 and two on rank 1 give other numbers of batches. The rank that is done stops the loop, and the
other waits for it in its next backward.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP405",
    "subjects": ["step 2"],
    "ranks": [1],
    "severity": "error",
    "cause": "StopIteration",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def shard(batch: Tensor, rank: int, world_size: int, loaders: dict[int, Iterator[int]], files: int) -> Tensor:
    loader = loaders.setdefault(rank, iter(range(files)))
    next(loader)
    return batch.tensor_split(world_size)[rank]


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(
    model=model, batch=batch, loss=loss, shard=lambda *a, loaders={}: shard(*a, loaders, files=2 if a[1] == 1 else 5)
)
fixed = Recipe(model=model, batch=batch, loss=loss, shard=lambda *a, loaders={}: shard(*a, loaders, files=50))
