"""DDP201: rank 1 has one layer more; DDP knows only that the counts differ."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXPECT = {"code": "DDP201", "subjects": ["extra.weight", "extra.bias"], "ranks": [1], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        if rank() == 1:
            self.extra = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x).tanh()
        return self.head(hidden) + (self.extra(hidden) if rank() == 1 else 0)


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
