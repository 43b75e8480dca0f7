"""DDP204: float16 on rank 0, bfloat16 on rank 1: of one size, so DDP is silent and the gradients are nonsense."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXPECT = {"code": "DDP204", "subjects": ["gain"], "ranks": [1], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.gain = nn.Parameter(torch.ones(8, dtype=torch.bfloat16 if rank() == 1 else torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).tanh() * self.gain.to(x.dtype))


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
