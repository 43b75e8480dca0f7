"""LayerDrop without find_unused_parameters.

A layer that is dropped gives no gradient, here or there; DDP waits for it on the ranks that kept it.
"""

import random

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP104",
    "subjects": [
        "layers.0.weight",
        "layers.0.bias",
        "layers.1.weight",
        "layers.1.bias",
        "layers.2.weight",
        "layers.2.bias",
    ],
    "ranks": [],
    "severity": "error",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or random.random() > 0.4:  # every rank has a generator of its own
                x = x + layer(x).tanh()
        return self.head(x)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=Net, batch=batch, loss=loss)
fixed = Recipe(model=Net, batch=batch, loss=loss, ddp_kwargs={"find_unused_parameters": True})
