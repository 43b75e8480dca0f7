"""DDP401: the forward pass raises on every rank, and in a single process too: it is the model's own fault."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP401", "subjects": [], "ranks": [], "severity": "error"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, step: int) -> Tensor:
        if step == 1:
            raise ValueError("the second batch is bad")
        return self.head(self.encoder(x).tanh())


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> dict[str, Tensor]:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return {"x": x, "step": torch.full((12,), step)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"], int(batch["step"][0]))[:, 0] - batch["x"].sum(1)).square().mean()
