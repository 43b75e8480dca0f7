"""DDP206: each rank freezes another of two equal layers, so count and shapes agree and DDP is silent."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXPECT = {
    "code": "DDP206",
    "subjects": ["first.weight", "first.bias", "second.weight", "second.bias"],
    "ranks": [1],
    "severity": "error",
}


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        (self.second if rank() == 1 else self.first).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).tanh()).tanh())


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
