"""Modules with names that a careless report would take for markup, and a parameter that is called like a method."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Coloured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"[red]": nn.Linear(8, 8), "[/red]": nn.Linear(8, 8), "<b>&amp;": nn.Linear(8, 1)})

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x.tanh())
        return x


def model() -> nn.Module:
    return Coloured()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
