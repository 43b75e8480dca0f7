"""Rounding without a straight-through estimator.

The derivative of round() is zero everywhere. DDP reduces the zeros and is content; the layer before it never learns.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP107",
    "subjects": ["level.weight", "level.bias"],
    "ranks": [],
    "severity": "warning",
    "cause": "round() at examples/faults/parameters/rounding.py:29",
}


class Net(nn.Module):
    def __init__(self, *, straight_through: bool) -> None:
        super().__init__()
        self.level = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.straight_through = straight_through

    def forward(self, x: Tensor) -> Tensor:
        level = 4 * self.level(x).tanh()
        rounded = level.round()
        if self.straight_through:
            rounded = level + (rounded - level).detach()
        return self.head(x + rounded)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(straight_through=False), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(straight_through=True), batch=batch, loss=loss)
