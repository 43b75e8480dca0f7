"""One rank never leaves a loop.

A search that converges on the data of most ranks does not on one. The process is busy, its peers wait in backward,
and nothing is printed.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP402",
    "subjects": ["step 0: forward"],
    "ranks": [1],
    "severity": "error",
    "timeout": 4,
    "cause": "loops_on_one_rank.py",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def searching(model: nn.Module, batch: Tensor, most: float = math.inf) -> Tensor:
    target, rounds = batch.sum(1), 0
    while rank() == 1 and target.norm() > 0 and rounds < most:
        target, rounds = target.roll(1), rounds + 1
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


broken = Recipe(model=model, batch=batch, loss=searching)
fixed = Recipe(model=model, batch=batch, loss=lambda model, batch: searching(model, batch, most=10))
