"""DDP304: a scale from the largest value of the batch; so weak that it shows in the gradients of one module only."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP304", "subjects": ["scaled"], "ranks": [], "severity": "warning"}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return 1e-5 * self.inner(x) / x.abs().max()


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled()
        self.main = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x) + self.scaled(x)


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch).square().mean()
