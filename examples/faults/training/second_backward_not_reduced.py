"""Two forward passes, then two backward passes.

The first backward ends the reduction of the step; what the second one adds stays on its rank.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP509",
    "subjects": ["backward"],
    "ranks": [],
    "severity": "error",
    "cause": "second_backward_not_reduced.py:35",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def half(model: nn.Module, part: Tensor) -> Tensor:
    return (model(part)[:, 0] - part.sum(1)).square().mean() / 2


def two_backwards(model: nn.Module, batch: Tensor) -> Tensor:
    first, last = batch.chunk(2)
    losses = [half(model, first), half(model, last)]
    losses[0].backward()
    return losses[1]  # whose backward comes second


def one_backward(model: nn.Module, batch: Tensor) -> Tensor:
    first, last = batch.chunk(2)
    return half(model, first) + half(model, last)


broken = Recipe(model=model, batch=batch, loss=two_backwards)
fixed = Recipe(model=model, batch=batch, loss=one_backward)
