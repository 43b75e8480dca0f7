"""DDP103: a low-rank adapter is merged into the base weight under `no_grad`, so it never learns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPECT = {"code": "DDP103", "subjects": ["lora_a", "lora_b"], "ranks": [], "severity": "error"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.base.weight.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(2, 8))
        self.lora_b = nn.Parameter(torch.randn(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            merged = self.base.weight + self.lora_b @ self.lora_a
        return F.linear(x, merged, self.base.bias)


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch).square().mean()
