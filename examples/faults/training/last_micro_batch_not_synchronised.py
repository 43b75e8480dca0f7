"""The first micro-batch is synchronised instead of the last.

The condition is off by one: what the last backward pass adds comes after the reduction and stays on its rank.
"""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP502",
    "subjects": ["no_sync"],
    "ranks": [],
    "severity": "error",
    "cause": "after the reduction",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def accumulated(model: nn.Module, batch: Tensor, synchronised: int) -> Tensor:
    parts = batch.chunk(3)
    for index, part in enumerate(parts):
        with nullcontext() if index == synchronised or not hasattr(model, "no_sync") else model.no_sync():
            loss = (model(part)[:, 0] - part.sum(1)).square().mean() / len(parts)
            if index == len(parts) - 1:
                return loss
            loss.backward()
    raise AssertionError("there are parts")


def the_first(model: nn.Module, batch: Tensor) -> Tensor:
    return accumulated(model, batch, synchronised=0)


def the_last(model: nn.Module, batch: Tensor) -> Tensor:
    return accumulated(model, batch, synchronised=2)


broken = Recipe(model=model, batch=batch, loss=the_first)
fixed = Recipe(model=model, batch=batch, loss=the_last)
