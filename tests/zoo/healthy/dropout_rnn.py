"""A GRU with dropout between its layers, which no dropout module shows, and some by `functional.dropout`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 8, num_layers=2, batch_first=True, dropout=0.3)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.gru(x)[0][:, -1], 0.1, self.training))


def model() -> nn.Module:
    return Recurrent()


def batch(step: int) -> Tensor:
    return torch.randn(12, 5, 4, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum((1, 2))).square().mean()
