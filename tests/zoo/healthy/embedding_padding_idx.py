"""An embedding whose padding row never gets a gradient, and whose other rows get one in some steps only."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8, padding_idx=0)
        self.head = nn.Linear(8, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).mean(1))


def model() -> nn.Module:
    return Padded()


def batch(step: int) -> Tensor:
    tokens = torch.randint(40, (12, 4), generator=torch.Generator().manual_seed(step))
    tokens[:, -1] = 0
    return tokens


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 1).square().mean()
