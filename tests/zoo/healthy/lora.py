"""A low-rank adapter on a frozen layer: B starts at zero, so the gradient of A is zero in the first step only."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(2, 8) / 8**0.5)
        self.lora_b = nn.Parameter(torch.zeros(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


def model() -> nn.Module:
    return Adapted()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch).square().mean()
