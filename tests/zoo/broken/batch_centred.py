"""DDP304: the model itself subtracts the mean over its shard, without any module to name but the outermost."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP304", "subjects": [], "ranks": [], "severity": "warning"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        return self.head((hidden - hidden.mean(0)).tanh())


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
