"""DDP103 or DDP102: a part of the loss is rebuilt from `.item()`, which takes the value and leaves the graph."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": ["DDP103", "DDP102"], "subjects": ["extra.weight", "extra.bias"], "ranks": [], "severity": "error"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.extra = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encoder(x).tanh()
        return self.head(hidden), self.extra(hidden)


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    prediction, extra = model(batch)
    penalty = torch.tensor(extra.square().mean().item())
    return (prediction[:, 0] - batch.sum(1)).square().mean() + penalty
