"""Features are centred with the mean of the local batch.

The mean of a shard is not that of the batch, and its gradient couples the samples of the shard only.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from ddpcheck import Recipe

EXPECT = {"code": "DDP304", "subjects": ["centre"], "ranks": [], "severity": "warning", "cause": "batch_centred.py:31"}


class LocalCentre(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class GlobalCentre(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0)
        return x - (all_reduce(mean) / dist.get_world_size() if dist.is_initialized() else mean)


class Net(nn.Module):
    def __init__(self, centre: nn.Module) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.centre = centre
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.centre(self.body(x)).tanh())


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(LocalCentre()), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(GlobalCentre()), batch=batch, loss=loss)
