"""DDP403: all ranks all-reduce in forward, rank 1 a longer tensor."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXPECT = {"code": ["DDP403", "DDP404", "DDP402"], "subjects": [], "ranks": [], "severity": "error"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(torch.zeros(8 + 4 * dist.get_rank(), device=x.device))
        return self.head(self.encoder(x).tanh())


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
