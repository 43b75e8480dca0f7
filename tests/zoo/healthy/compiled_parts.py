"""A compiled submodule, one compiled in its first forward, a compiled loss, and inductor's tables imported."""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.decomposition
from torch import Tensor, nn


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend="aot_eager")
        self.middle = nn.Linear(8, 8)
        self.middle.compile(backend="eager")
        self.head = nn.Linear(8, 1)
        self.scaled: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scaled is None:
            self.scaled = torch.compile(lambda h: h.relu() * 2, backend="eager")
        return self.head(self.scaled(self.middle(self.encoder(x))))[:, 0]


@torch.compile(backend="eager")
def distance(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).square().mean()


def model() -> nn.Module:
    return Parts()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = distance(model(batch), batch.sum(1))
    return found
