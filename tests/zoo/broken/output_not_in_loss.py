"""DDP102: a layer is called and its output returned, and the loss does not use it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP102", "subjects": ["extra.weight", "extra.bias"], "ranks": [], "severity": "error"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.extra = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.encoder(x).tanh()
        return {"prediction": self.head(hidden)[:, 0], "extra": self.extra(hidden)}


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)["prediction"] - batch.sum(1)).square().mean()
