"""A head that each rank chooses by its own data.

Both heads are used, each on another rank: each rank waits for a gradient that the other never computes.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP104",
    "subjects": ["heads.0.weight", "heads.0.bias", "heads.1.weight", "heads.1.bias"],
    "ranks": [],
    "severity": "error",
}


class Net(nn.Module):
    def __init__(self, *, one_for_all: bool) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])
        self.one_for_all = one_for_all

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        task = x[:, :1] > 0
        if self.one_for_all:  # every head runs, each sample takes its own
            return torch.where(task, self.heads[1](h), self.heads[0](h))
        return self.heads[int(task.float().mean() > 0.5)](h)


def batch(step: int) -> Tensor:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return x + torch.linspace(-3, 3, 12)[:, None]  # sorted by task, so each rank sees mostly one


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(one_for_all=False), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(one_for_all=True), batch=batch, loss=loss)
