"""Two losses of one forward pass call backward one after the other.

The reducer is finished by the first backward; the gradient of the second loss is never averaged.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP509",
    "subjects": ["backward"],
    "ranks": [],
    "severity": "error",
    "cause": "backward_twice_through_one_forward.py:30",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def separately(model: nn.Module, batch: Tensor) -> Tensor:
    prediction = model(batch)[:, 0]
    (0.1 * prediction.square().mean()).backward(retain_graph=True)
    return (prediction - batch.sum(1)).square().mean()


def together(model: nn.Module, batch: Tensor) -> Tensor:
    prediction = model(batch)[:, 0]
    return 0.1 * prediction.square().mean() + (prediction - batch.sum(1)).square().mean()


broken = Recipe(model=model, batch=batch, loss=separately)
fixed = Recipe(model=model, batch=batch, loss=together)
