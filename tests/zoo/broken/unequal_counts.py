"""DDP305: padded targets, and each rank divides by the number of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP305", "subjects": [], "ranks": [], "severity": "error"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> dict[str, Tensor]:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return {"x": x, "keep": (torch.arange(12) < 6) | (torch.arange(12) % 3 == 0)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    errors = (model(batch["x"])[:, 0] - batch["x"].sum(1)).square()
    return errors[batch["keep"]].mean()
