"""DDP403: rank 0 all-reduces a metric that rank 1 does not; it meets rank 1's gradients instead."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXPECT = {"code": ["DDP403", "DDP402", "DDP404"], "subjects": [], "ranks": [], "severity": "error"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x).tanh()
        if dist.is_available() and dist.is_initialized() and dist.get_rank() == 0:
            dist.all_reduce(hidden.detach().mean(0))
        return self.head(hidden)


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
