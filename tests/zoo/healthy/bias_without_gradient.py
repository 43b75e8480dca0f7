"""Biases whose gradient is zero but for rounding: one that a norm removes, one that a softmax cannot see.

What comes out as their gradient is noise, as large in error as in value: no comparison may take it for a fault.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Invariant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.conv = nn.Conv1d(8, 8, 3)
        self.norm = nn.GroupNorm(8, 8)  # takes the mean of every channel away, and conv.bias with it
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.query(x) @ self.key(x).transpose(1, 2)).softmax(-1)  # key.bias adds the same to all keys
        x = weights @ self.value(x)
        return self.head(self.norm(self.conv(x.transpose(1, 2))).relu().mean(2))


def model() -> nn.Module:
    return Invariant()


def batch(step: int) -> Tensor:
    return torch.randn(12, 6, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum((1, 2))).square().mean()
