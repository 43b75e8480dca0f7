"""An unused head behind find_unused_parameters=True.

DDP puts up with it: nothing is raised, the graph is searched in every step, and the head never learns.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP101",
    "subjects": ["old_head.weight", "old_head.bias"],
    "ranks": [],
    "severity": "warning",
    "cause": "nothing has trained them",
}


class Net(nn.Module):
    def __init__(self, *, old_head: bool) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        if old_head:
            self.old_head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(old_head=True), batch=batch, loss=loss, ddp_kwargs={"find_unused_parameters": True})
fixed = Recipe(model=lambda: Net(old_head=False), batch=batch, loss=loss)
