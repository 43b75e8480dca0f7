"""A gate in TorchScript, behind a norm that leaves no gradient for the bias before it but rounding.

TorchScript profiles a function in its first two calls and optimises it then, so that steps round differently.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.jit.script
def gate(x: Tensor, weight: Tensor) -> Tensor:
    opened = torch.sigmoid(x * weight)
    return (opened * x).tanh() + opened * 0.3 * x.relu()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.GroupNorm(8, 8), nn.Linear(8, 3)
        self.weight = nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(gate(self.norm(self.conv(x)), self.weight).mean((2, 3)))


def model() -> nn.Module:
    return Gated()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, 8, 8, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)
