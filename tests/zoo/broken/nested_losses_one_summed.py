"""DDP305: of two losses one is a sum, so only what it reaches is scaled, and by no constant."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": ["DDP305", "DDP303"], "subjects": [], "ranks": [], "severity": "error"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(x).tanh()
        return code, self.decoder(code)


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    code, decoded = model(batch)
    return {"reconstruction": (decoded - batch).square().mean(), "penalty": 0.1 * code.square().sum()}
