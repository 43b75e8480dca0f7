"""DDP101: one of two sparse embeddings is never looked up."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP101", "subjects": ["old.weight"], "ranks": [], "severity": "error"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.old = nn.Embedding(30, 8, sparse=True)
        self.embedding = nn.Embedding(30, 8, sparse=True)
        self.head = nn.Linear(8, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).mean(1))


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randint(30, (12, 4), generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 1).square().mean()
