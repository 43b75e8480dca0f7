"""DDP107: the gate of a residual branch is a buffer of zeros, so what is behind it never gets a gradient but zero."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP107", "subjects": ["layer.weight", "layer.bias"], "ranks": [], "severity": "warning"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.register_buffer("gate", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.gate * self.layer(x).tanh())


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
