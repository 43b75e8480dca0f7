"""One rank waits for something outside.

A rank that waits for a lock, a download or a queue leaves the others in their next collective, for 30 minutes by
default. The report names the line at which it waits.
"""

import time

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
    "cause": "sleeps_on_one_rank.py:35",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def waiting(model: nn.Module, batch: Tensor) -> Tensor:
    while rank() == 1:
        time.sleep(0.1)
    return plain(model, batch)


def plain(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


broken = Recipe(model=model, batch=batch, loss=waiting)
fixed = Recipe(model=model, batch=batch, loss=plain)
