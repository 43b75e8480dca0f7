"""DDP105: two heads take turns without `find_unused_parameters`; each is missing in some steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {
    "code": "DDP105",
    "subjects": ["heads.0.weight", "heads.0.bias", "heads.1.weight", "heads.1.bias"],
    "ranks": [],
    "severity": "error",
}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(2))

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.heads[step % 2](self.encoder(x).tanh())


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> dict[str, Tensor]:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return {"x": x, "step": torch.full((12,), step)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"], int(batch["step"][0]))[:, 0] - batch["x"].sum(1)).square().mean()
