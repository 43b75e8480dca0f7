"""Parameters are initialised from the first local batch, after wrapping.

DDP broadcasts parameters when it is constructed and never again. A layer that sets its scale in its first forward
(ActNorm) sets another one on each rank, and the models stay apart.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP515", "subjects": ["norm.scale"], "ranks": [], "severity": "error"}


class ActNorm(nn.Module):
    def __init__(self, data: Tensor | None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.ready = data is not None
        if data is not None:
            self.initialise(data)

    def initialise(self, x: Tensor) -> None:
        self.scale.data = 1 / x.std(0)
        self.ready = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.initialise(x.detach())
        return x * self.scale


class Net(nn.Module):
    def __init__(self, data: Tensor | None) -> None:
        super().__init__()
        self.norm = ActNorm(data)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(None), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(batch(0)), batch=batch, loss=loss)
