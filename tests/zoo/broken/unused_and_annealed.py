"""DDP101: an unused head, in a model that draws random numbers and counts its steps in an object of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP101", "subjects": ["old.weight", "old.bias"], "ranks": [], "severity": "error"}


class Annealer:
    def __init__(self) -> None:
        self.steps = 0

    def __call__(self) -> float:
        self.steps += 1
        return min(1.0, self.steps / 10)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.decoder = nn.Linear(4, 8)
        self.old = nn.Linear(8, 1)
        self.annealer = Annealer()

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (spread / 2).exp()
        divergence = -0.5 * (1 + spread - mean**2 - spread.exp()).sum(1).mean()
        return (self.decoder(z) - x).square().mean() + self.annealer() * divergence


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)
