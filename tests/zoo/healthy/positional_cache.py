"""A table of sines that is kept in a buffer outside the state dict, and grows when it is asked for more."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Positional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 1)
        self.register_buffer("table", torch.empty(0, 8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < x.shape[1]:
            positions = torch.arange(float(x.shape[1]), device=x.device)[:, None]
            self.table = torch.sin(positions / 10 ** (torch.arange(8.0, device=x.device) / 8))
        return self.head(x + self.table[: x.shape[1]].to(x.dtype)).mean(1)


def model() -> nn.Module:
    return Positional()


def batch(step: int) -> Tensor:
    return torch.randn(12, 4 + step, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum((1, 2))).square().mean()
