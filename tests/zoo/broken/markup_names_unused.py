"""DDP101: an unused module whose name looks like markup, which the report must keep."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP101", "subjects": ["parts.[red].weight", "parts.[red].bias"], "ranks": [], "severity": "error"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"[red]": nn.Linear(8, 8), "[/red]": nn.Linear(8, 1)})

    def forward(self, x: Tensor) -> Tensor:
        return self.parts["[/red]"](x)


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
