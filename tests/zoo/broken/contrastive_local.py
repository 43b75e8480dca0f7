"""DDP304: a contrastive loss sees the negatives of its own rank only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPECT = {"code": "DDP304", "subjects": [], "ranks": [], "severity": "warning"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.left(x), dim=1) @ F.normalize(self.right(x.roll(1, 1)), dim=1).T


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = 3 * model(batch)
    return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))
