"""A layer that the only step does not read.

DDP would raise at the next forward. There is none, so the run ends without a word, and nothing was synchronised.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP101",
    "subjects": ["adapter.weight", "adapter.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "unused_in_the_only_step.py:31",
    "steps": 1,
}


class Net(nn.Module):
    def __init__(self, *, skip: bool) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.adapter = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        return self.head(h if self.skip else h + self.adapter(h))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(skip=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(skip=False), batch=batch, loss=loss)
