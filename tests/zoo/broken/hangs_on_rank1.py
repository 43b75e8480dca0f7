"""DDP402: rank 1 sleeps for ever in its forward pass while rank 0 waits for it in backward."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXPECT = {"code": "DDP402", "subjects": [], "ranks": [1], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        while rank() == 1:
            time.sleep(0.1)
        return self.head(self.encoder(x).tanh())


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
