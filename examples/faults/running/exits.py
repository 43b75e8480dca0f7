"""One rank calls sys.exit.

A script that exits where its data ends leaves the other ranks waiting. SystemExit is no Exception, so a handler
around the training loop does not see it.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP404",
    "subjects": ["step 0: forward"],
    "ranks": [1],
    "severity": "error",
    "cause": "exits.py:",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def ending(model: nn.Module, batch: Tensor) -> Tensor:
    if rank() == 1:
        sys.exit(7)
    return plain(model, batch)


def plain(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


broken = Recipe(model=model, batch=batch, loss=ending)
fixed = Recipe(model=model, batch=batch, loss=plain)
