"""Linear layers in bfloat16 around a LayerNorm in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 1, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x.to(self.first.weight.dtype)).to(self.norm.weight.dtype))
        return self.last(x.to(self.last.weight.dtype)).float()


def model() -> nn.Module:
    return Mixed()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
