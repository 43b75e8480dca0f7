"""A layer behind a ReLU that is always off.

An initial bias far below zero keeps the unit off for every input, and a unit that is off has no gradient to leave by.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP107",
    "subjects": ["body.weight", "body.bias"],
    "ranks": [],
    "severity": "warning",
    "cause": "relu() at examples/faults/parameters/dead_relu.py:28",
}


class Net(nn.Module):
    def __init__(self, *, bias: float) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        nn.init.constant_(self.body.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.body(x).relu())


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(bias=-100.0), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(bias=0.1), batch=batch, loss=loss)
