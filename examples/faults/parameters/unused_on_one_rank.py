"""A branch that only rank 0 takes.

Rank 0 starts the all-reduce of the bucket and waits; rank 1 never joins it, and raises at its next forward.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP104",
    "subjects": ["extra.weight", "extra.bias"],
    "ranks": [1],
    "severity": "error",
    "cause": "no operation of the forward pass reads",
}


class Net(nn.Module):
    def __init__(self, *, on_first_rank_only: bool) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.extra = nn.Linear(8, 1)
        self.on_first_rank_only = on_first_rank_only

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        if self.on_first_rank_only and dist.is_initialized() and dist.get_rank() != 0:
            return self.head(h)
        return self.head(h) + self.extra(h)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(on_first_rank_only=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(on_first_rank_only=False), batch=batch, loss=loss)
