"""zero_grad in every micro-step of an accumulation.

What the micro-steps before the last have computed is thrown away: the model trains on a part of the batch.
"""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP517",
    "subjects": ["zero_grad"],
    "ranks": [],
    "severity": "error",
    "cause": "micro_gradients_discarded.py:35",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def accumulate(model: nn.Module, batch: Tensor, *, zero: bool) -> Tensor:
    first, last = (batch[::2], batch[1::2])
    with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
        ((model(first)[:, 0] - first.sum(1)).square().mean() / 2).backward()
    if zero:
        model.zero_grad()
    return (model(last)[:, 0] - last.sum(1)).square().mean() / 2


broken = Recipe(model=model, batch=batch, loss=lambda model, batch: accumulate(model, batch, zero=True))
fixed = Recipe(model=model, batch=batch, loss=lambda model, batch: accumulate(model, batch, zero=False))
