"""A scale that is learned is a global variable, and no parameter of the model.

It receives a gradient on every rank, and nobody averages it.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP106",
    "subjects": ["SCALE"],
    "ranks": [],
    "severity": "error",
    "cause": "The global variable SCALE",
}

SCALE = torch.ones(1, requires_grad=True)


def scaled(y: Tensor) -> Tensor:
    return y * SCALE


class Net(nn.Module):
    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.ones(1)) if registered else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(torch.tanh(self.body(x)))
        return scaled(y) if self.scale is None else y * self.scale


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(registered=False), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(registered=True), batch=batch, loss=loss)
