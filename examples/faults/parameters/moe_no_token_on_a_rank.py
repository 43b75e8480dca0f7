"""An expert that gets no token on one of the ranks.

Routing follows the data, and every rank has other data. Called with no tokens, an expert gives zeros, and DDP is
content.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP104", "subjects": ["experts.1.weight", "experts.1.bias"], "ranks": [0], "severity": "error"}


class Net(nn.Module):
    def __init__(self, *, skip_empty: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 1)
        self.skip_empty = skip_empty

    def forward(self, x: Tensor) -> Tensor:
        choice = (x[:, 0] > 0).long()  # stands for a router
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = choice == index
            if mine.any() or not self.skip_empty:
                mixed[mine] = expert(x[mine]).tanh()
        return self.head(x + mixed)


def batch(step: int) -> Tensor:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    x[:6, 0] = -x[:6, 0].abs()  # the shard of rank 0
    x[6:9, 0] = -x[6:9, 0].abs()
    x[9:, 0] = x[9:, 0].abs()
    return x


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(skip_empty=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(skip_empty=False), batch=batch, loss=loss)
