"""DDP106: the temperature is a buffer that requires grad, and so is no parameter to DDP and to the optimizer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP106", "subjects": ["temperature"], "ranks": [], "severity": "error"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.register_buffer("temperature", torch.ones((), requires_grad=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / self.temperature


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
