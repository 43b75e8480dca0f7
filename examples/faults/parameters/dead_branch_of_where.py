"""A branch of torch.where that is never taken.

Both branches are computed and both get a gradient; that of the branch not taken is zero.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP107",
    "subjects": ["extra.weight", "extra.bias"],
    "ranks": [],
    "severity": "warning",
    "cause": "where() at examples/faults/parameters/dead_branch_of_where.py:30",
}


class Net(nn.Module):
    def __init__(self, *, above: float) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.extra = nn.Linear(8, 1)
        self.above = above

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        return torch.where(h[:, :1] > self.above, self.extra(h), self.head(h))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(above=2), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(above=0), batch=batch, loss=loss)
