"""DDP103: a selector's choice is made by argmax, which has no gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPECT = {"code": "DDP103", "subjects": ["selector.weight", "selector.bias"], "ranks": [], "severity": "error"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.selector = nn.Linear(8, 3)
        self.heads = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        choice = F.one_hot(self.selector(x).argmax(1), 3)
        return (self.heads(x) * choice).sum(1, keepdim=True)


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
