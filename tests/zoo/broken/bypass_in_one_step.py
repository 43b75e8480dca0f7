"""DDP501: the last step goes past the wrapper, and DDP is silent."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP501", "subjects": [], "ranks": [], "severity": "error"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> dict[str, Tensor]:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return {"x": x, "step": torch.full((12,), step)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    chosen = getattr(model, "module", model) if batch["step"][0] == 2 else model
    return (chosen(batch["x"])[:, 0] - batch["x"].sum(1)).square().mean()
