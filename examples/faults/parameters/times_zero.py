"""A head that is in the loss with the factor zero.

This is how people silence DDP: it gets its gradient, the gradient is zero, and the head never learns.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP107",
    "subjects": ["extra.weight", "extra.bias"],
    "ranks": [],
    "severity": "warning",
    "cause": "mul() at examples/faults/parameters/times_zero.py:30",
}


class Net(nn.Module):
    def __init__(self, *, weight: float) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.extra = nn.Linear(8, 1)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        return self.head(h) + self.weight * self.extra(h)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(weight=0.0), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(weight=0.5), batch=batch, loss=loss)
