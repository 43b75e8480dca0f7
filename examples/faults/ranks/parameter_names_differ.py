"""A layer has another name on each rank.

DDP pairs parameters by position and trains on, but a checkpoint of rank 0 does not load on rank 1, and optimizer
groups and freezing rules that go by name choose other parameters.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP201",
    "subjects": ["head_rank0.bias", "head_rank0.weight", "head_rank1.bias", "head_rank1.weight"],
    "ranks": [1],
    "severity": "error",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Net(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.name = name
        self.add_module(name, nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(self.name)(self.body(x).tanh())


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(f"head_rank{rank()}"), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net("head"), batch=batch, loss=loss)
