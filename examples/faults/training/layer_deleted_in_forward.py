"""A layer that serves to initialise is deleted in the first forward pass.

DDP has counted its parameters, and goes on waiting for their gradients.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP503",
    "subjects": ["start.weight", "start.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "removed in the forward pass of step 0",
}


class Net(nn.Module):
    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.start = nn.Linear(8, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        if not late:
            del self.start

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "start"):
            del self.start
        return self.head(torch.tanh(self.body(x)))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(late=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(late=False), batch=batch, loss=loss)
