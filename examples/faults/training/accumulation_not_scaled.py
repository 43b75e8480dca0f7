"""Micro-batches of a fixed size are accumulated without dividing by their number.

backward adds up: the gradient grows with the number of micro-batches, which falls when ranks are added.
"""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP514",
    "subjects": ["loss"],
    "ranks": [],
    "severity": "error",
    "cause": "4 backward passes in the single process, 2 on a rank",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def accumulate(model: nn.Module, batch: Tensor, *, divide: bool) -> Tensor:
    parts = batch.split(3)
    losses = []
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        with nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
            value = (model(part)[:, 0] - part.sum(1)).square().mean()
            losses.append(value / len(parts) if divide else value)
            if not last:
                losses[-1].backward()
    return losses[-1]


broken = Recipe(model=model, batch=batch, loss=lambda model, batch: accumulate(model, batch, divide=False))
fixed = Recipe(model=model, batch=batch, loss=lambda model, batch: accumulate(model, batch, divide=True))
