"""DDP101 for one layer and DDP103 for another: two causes, two findings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP101", "subjects": ["extra.weight", "extra.bias"], "severity": "error", "also": ["DDP103"]}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.extra = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).tanh().detach())


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
