"""A buffer takes the shape of the local batch.

A mask is kept in a buffer and made anew where the number of samples changes. The shards have unequal sizes; the next
forward broadcasts the buffers, and gloo aborts the process of a rank whose mask is shorter.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP213", "subjects": ["mask"], "ranks": [1], "severity": "error", "cause": "step 0"}


class Net(nn.Module):
    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.kept = kept
        self.register_buffer("mask", torch.ones(12, 1))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(len(x), 1)
        if self.kept:
            self.mask = mask
        return self.head(self.body(x).tanh() * mask)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def shard(batch: Tensor, rank: int, world_size: int) -> Tensor:
    first = len(batch) // world_size + 1
    return batch[:first] if rank == 0 else batch[first:].tensor_split(world_size - 1)[rank - 1]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return (model(batch)[:, 0] - batch.sum(1)).square().sum() * ranks / 12


broken = Recipe(model=lambda: Net(kept=True), batch=batch, loss=loss, shard=shard)
fixed = Recipe(model=lambda: Net(kept=False), batch=batch, loss=loss, shard=shard)
