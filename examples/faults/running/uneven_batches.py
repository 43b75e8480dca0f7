"""One rank runs out of batches before the others.

Seven batches over two ranks: in the last step rank 1 has none. In a loop it leaves, and rank 0 waits in backward for
gradients that never come.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP405",
    "subjects": ["step 2"],
    "ranks": [1],
    "severity": "error",
    "cause": "its shard is empty",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(6 if step == 2 else 12, 8, generator=torch.Generator().manual_seed(step))


def by_files(batch: Tensor, rank: int, world_size: int) -> Tensor:
    return batch[6 * rank : 6 * rank + 6]  # six samples a file, a file for each rank


def evenly(batch: Tensor, rank: int, world_size: int) -> Tensor:
    return batch.tensor_split(world_size)[rank]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=model, batch=batch, loss=loss, shard=by_files)
fixed = Recipe(model=model, batch=batch, loss=loss, shard=evenly)
