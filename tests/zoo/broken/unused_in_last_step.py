"""DDP105: a layer that only step 2 leaves out, where DDP would say nothing because no forward follows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP105", "subjects": ["extra.weight", "extra.bias"], "ranks": [], "severity": "error"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.extra = nn.Linear(8, 1)

    def forward(self, x: Tensor, step: int) -> Tensor:
        hidden = self.encoder(x).tanh()
        return self.head(hidden) + self.extra(hidden) if step < 2 else self.head(hidden)


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> dict[str, Tensor]:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return {"x": x, "step": torch.full((12,), step)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"], int(batch["step"][0]))[:, 0] - batch["x"].sum(1)).square().mean()
