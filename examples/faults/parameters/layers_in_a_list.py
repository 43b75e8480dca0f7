"""Layers kept in a Python list.

module.parameters() does not look into lists: DDP never hears of these layers, and every rank trains its own.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP106",
    "subjects": ["layers[0].weight", "layers[0].bias", "layers[1].weight", "layers[1].bias"],
    "ranks": [],
    "severity": "error",
    "cause": "layers_in_a_list.py:23",
}


class Net(nn.Module):
    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
        self.layers = nn.ModuleList(layers) if registered else layers
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(registered=False), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(registered=True), batch=batch, loss=loss)
