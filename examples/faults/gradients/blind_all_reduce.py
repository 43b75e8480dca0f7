"""Batch statistics are synchronised by an all-reduce that autograd does not see.

The forward pass is that of the global batch; its gradient is not, since the statistics are constants for backward.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP309",
    "subjects": ["all_reduce"],
    "ranks": [],
    "severity": "error",
    "cause": "blind_all_reduce.py:24",
}


def blind(mean: Tensor) -> Tensor:
    total = mean.detach().clone()
    dist.all_reduce(total)
    return total


class Net(nn.Module):
    def __init__(self, reduce) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.reduce = reduce

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        mean = hidden.mean(0)
        if dist.is_initialized():
            mean = self.reduce(mean) / dist.get_world_size()
        return self.head((hidden - mean).tanh())


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(blind), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(all_reduce), batch=batch, loss=loss)
