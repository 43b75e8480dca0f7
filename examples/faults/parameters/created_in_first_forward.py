"""A layer created in the first forward.

DDP reads the list of parameters once, when it is constructed. What comes later is neither broadcast nor reduced.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP106",
    "subjects": ["projection.weight", "projection.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "created_in_first_forward.py:30",
}


class Net(nn.Module):
    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.projection = None if late else nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        if self.projection is None:
            self.projection = nn.Linear(h.shape[1], 8)
        return self.head(self.projection(h))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(late=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(late=False), batch=batch, loss=loss)
