"""A head that no operation of the forward pass reads.

DDP waits for the gradient of every parameter, so the step after the first raises; the first has synchronised nothing.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP101",
    "subjects": ["old_head.weight", "old_head.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "unused.py:26",
}


class Net(nn.Module):
    def __init__(self, *, old_head: bool) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        if old_head:
            self.old_head = nn.Linear(8, 1)  # left behind when the new one came

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(old_head=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(old_head=False), batch=batch, loss=loss)
