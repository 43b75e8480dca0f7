"""DDP309: features are centred over all ranks by a plain all-reduce, through which no gradient comes back."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXPECT = {"code": ["DDP309", "DDP304"], "subjects": [], "ranks": [], "severity": None}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        mean = hidden.mean(0)
        if dist.is_available() and dist.is_initialized():
            mean = mean.detach().clone()
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return self.head((hidden - mean).tanh())


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
