"""A sparse embedding table that is never looked up.

A row that no token asks for is fine. A table that none asks for has no gradient at all, and DDP waits for it.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP101", "subjects": ["old.weight"], "ranks": [], "severity": "error"}


class Net(nn.Module):
    def __init__(self, *, mixed: bool) -> None:
        super().__init__()
        self.old = nn.Embedding(30, 8, sparse=True)
        self.new = nn.Embedding(30, 8, sparse=True)
        self.head = nn.Linear(8, 1)
        self.mixed = mixed

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.new(tokens) * self.old(tokens) if self.mixed else self.new(tokens)
        return self.head(h.mean(1))


def batch(step: int) -> Tensor:
    return torch.randint(30, (12, 4), generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - 1).square().mean()


broken = Recipe(model=lambda: Net(mixed=False), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(mixed=True), batch=batch, loss=loss)
