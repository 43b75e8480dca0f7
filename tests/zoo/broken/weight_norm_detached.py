"""DDP103: a weight-normalised weight is read and detached; both parameters behind it are cut off."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

EXPECT = {
    "code": "DDP103",
    "subjects": ["encoder.parametrizations.weight.original0", "encoder.parametrizations.weight.original1"],
    "ranks": [],
    "severity": "error",
}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = weight_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(x, self.encoder.weight.detach(), self.encoder.bias).tanh())


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
