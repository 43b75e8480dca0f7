"""DDP215 or DDP214: each rank follows the mean of its own shard in a buffer, and the next broadcast keeps rank 0's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": ["DDP215", "DDP214"], "subjects": ["running_mean"], "ranks": [], "severity": "warning"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.register_buffer("running_mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running_mean.lerp_(x.detach().mean(0), 0.1)
        return self.head(self.encoder(x).tanh())


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
