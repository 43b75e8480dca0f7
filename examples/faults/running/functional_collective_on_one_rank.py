"""A functional collective is called by one rank only.

The functional collectives of torch are made for the compiler and are easily taken for local operations: they return a
tensor and wait where it is first used.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP403",
    "subjects": ["all_reduce"],
    "ranks": [1],
    "severity": "error",
    "cause": "functional_collective_on_one_rank.py",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def logging(model: nn.Module, batch: Tensor, only_first: bool) -> Tensor:
    error = (model(batch)[:, 0] - batch.sum(1)).square().mean()
    if dist.is_initialized() and (rank() == 0 or not only_first):
        total = all_reduce(error.detach(), "sum", dist.group.WORLD)
        assert total >= error.detach()
    return error


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


broken = Recipe(model=model, batch=batch, loss=lambda model, batch: logging(model, batch, True))
fixed = Recipe(model=model, batch=batch, loss=lambda model, batch: logging(model, batch, False))
