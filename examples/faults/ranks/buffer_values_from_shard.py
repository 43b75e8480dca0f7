"""Normalisation buffers come from each rank's shard, broadcast_buffers=False.

With broadcast_buffers=False buffers are not synchronised at construction either: every rank normalises its input in
its own way, in training and in what it saves.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP214", "subjects": ["mean"], "ranks": [1], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Net(nn.Module):
    def __init__(self, mean: float) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.register_buffer("mean", torch.full((8,), mean))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x - self.mean).tanh())


def mean_of_shard() -> float:
    return 0.1 * rank()  # of the files that this rank reads


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(mean_of_shard()), batch=batch, loss=loss, ddp_kwargs={"broadcast_buffers": False})
fixed = Recipe(model=lambda: Net(0.05), batch=batch, loss=loss, ddp_kwargs={"broadcast_buffers": False})
