"""The loss calls the parts of the inner module one by one.

No forward of the wrapper, nor of the module in it, is ever called, so the reducer is never prepared.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP501",
    "subjects": ["forward"],
    "ranks": [],
    "severity": "error",
    "cause": "never calls the wrapper",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def part_by_part(model: nn.Module, batch: Tensor) -> Tensor:
    inner = getattr(model, "module", model)
    return (inner.head(inner.body(batch).tanh())[:, 0] - batch.sum(1)).square().mean()


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=Net, batch=batch, loss=part_by_part)
fixed = Recipe(model=Net, batch=batch, loss=loss)
