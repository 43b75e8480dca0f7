"""A moving average of each rank's shard drifts apart, broadcast_buffers=False.

Nothing synchronises the buffer any more. The ranks evaluate with different statistics, and a checkpoint keeps rank
0's.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP214", "subjects": ["running_mean"], "ranks": [], "severity": "warning"}


class Net(nn.Module):
    def __init__(self, *, reduce: bool) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.reduce = reduce
        self.register_buffer("running_mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.reduce and dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        self.running_mean.lerp_(mean, 0.1)
        return self.head(self.body(x).tanh())


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(reduce=False), batch=batch, loss=loss, ddp_kwargs={"broadcast_buffers": False})
fixed = Recipe(model=lambda: Net(reduce=True), batch=batch, loss=loss, ddp_kwargs={"broadcast_buffers": False})
