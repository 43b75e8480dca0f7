"""DDP104: a layer runs only where the batch is positive on average, which holds on rank 0 and not on rank 1."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP104", "subjects": ["extra.weight", "extra.bias"], "ranks": [1], "severity": "error"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.extra = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x).tanh()
        prediction = self.head(hidden)
        if x.mean() > 0:
            prediction = prediction + self.extra(hidden)
        return prediction


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return x + torch.linspace(3, -2, 12)[:, None]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
