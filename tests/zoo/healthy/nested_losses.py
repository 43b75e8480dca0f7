"""loss returns a dict of scalars, one of them in a list."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class AutoEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 4)
        self.decoder = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(x).tanh()
        return code, self.decoder(code)


def model() -> nn.Module:
    return AutoEncoder()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> dict[str, Any]:
    code, decoded = model(batch)
    return {"reconstruction": (decoded - batch).square().mean(), "penalties": [code.abs().mean(), code.square().mean()]}
