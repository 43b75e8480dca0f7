"""Layers kept in a dict.

A dict hides its layers from module.parameters() as a list does; nn.ModuleDict does not.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP106",
    "subjects": [
        "branches['left'].weight",
        "branches['left'].bias",
        "branches['right'].weight",
        "branches['right'].bias",
    ],
    "ranks": [],
    "severity": "error",
    "cause": "layers_in_a_dict.py:28",
}


class Net(nn.Module):
    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        branches = {"left": nn.Linear(8, 8), "right": nn.Linear(8, 8)}
        self.branches = nn.ModuleDict(branches) if registered else branches
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.branches["left"](x).tanh() * self.branches["right"](x).tanh())


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(registered=False), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(registered=True), batch=batch, loss=loss)
