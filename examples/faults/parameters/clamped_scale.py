"""A learned scale outside the range to which it is clamped.

The derivative of clamp() is zero outside its range: a parameter that has left it, or began outside, never comes back.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP107",
    "subjects": ["log_scale"],
    "ranks": [],
    "severity": "warning",
    "cause": "clamp() at examples/faults/parameters/clamped_scale.py:28",
}


class Net(nn.Module):
    def __init__(self, *, log_scale: float) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.log_scale = nn.Parameter(torch.tensor(log_scale))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.log_scale.exp().clamp(max=100)
        return self.head((scale * self.body(x)).softmax(1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(log_scale=10.0), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(log_scale=1.0), batch=batch, loss=loss)
