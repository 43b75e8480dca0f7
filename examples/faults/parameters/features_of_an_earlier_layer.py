"""Features are taken from the layer before the last.

The last layer still runs and still waits for a gradient; the model should end where its features are taken.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP102", "subjects": ["layers.2.weight", "layers.2.bias"], "ranks": [], "severity": "error"}


class Net(nn.Module):
    def __init__(self, *, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]).tanh())
        return self.head(states[2])


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(depth=3), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(depth=2), batch=batch, loss=loss)
