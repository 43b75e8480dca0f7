"""DDP202: rank 1 registers two layers of one shape the other way round; DDP silently mixes their gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXPECT = {"code": "DDP202", "subjects": [], "ranks": [1], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = {"first": nn.Linear(8, 8), "second": nn.Linear(8, 8)}
        for name in sorted(layers, reverse=rank() == 1):
            self.add_module(name, layers[name])
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).tanh()).tanh())


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
