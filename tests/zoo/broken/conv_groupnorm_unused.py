"""DDP101: a second GroupNorm is built and the first one used twice."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP101", "subjects": ["norm_2.weight", "norm_2.bias"], "ranks": [], "severity": "error"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_1, self.conv_2 = nn.Conv1d(1, 4, 3), nn.Conv1d(4, 4, 3)
        self.norm_1, self.norm_2 = nn.GroupNorm(2, 4), nn.GroupNorm(2, 4)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_1(self.conv_1(x[:, None])).relu()
        x = self.norm_1(self.conv_2(x)).relu()
        return self.head(x.flatten(1))


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
