"""A sparse embedding table that is never looked up, find_unused_parameters=True.

The option is no help here: DDP has no sparse gradient to put in the place of the missing one, and raises in backward.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP101",
    "subjects": ["old.weight"],
    "ranks": [],
    "severity": "error",
    "cause": "Expected sparse gradient to be defined",
}


class Net(nn.Module):
    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.old = nn.Embedding(30, 8, sparse=True).requires_grad_(not frozen)
        self.new = nn.Embedding(30, 8, sparse=True)
        self.head = nn.Linear(8, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.new(tokens).mean(1))


def batch(step: int) -> Tensor:
    return torch.randint(30, (12, 4), generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - 1).square().mean()


options = {"find_unused_parameters": True}
broken = Recipe(model=lambda: Net(frozen=False), batch=batch, loss=loss, ddp_kwargs=options)
fixed = Recipe(model=lambda: Net(frozen=True), batch=batch, loss=loss)
