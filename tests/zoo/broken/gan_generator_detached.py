"""DDP103: the generator's own loss is computed on a detached sample."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPECT = {"code": "DDP103", "subjects": ["generator.weight", "generator.bias"], "ranks": [], "severity": "error"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(8, 8)
        self.discriminator = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        fake = self.generator(x.flip(1)).detach()
        return {"real": self.discriminator(x), "fake": self.discriminator(fake)}


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    judged = model(batch)
    return F.softplus(-judged["real"]).mean() + F.softplus(judged["fake"]).mean()
