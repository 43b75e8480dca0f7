"""A collective has another shape on one rank.

Each rank all-reduces one number for each class in its batch. Flat memory of other sizes is paired: gloo aborts the
process, nccl hangs or reads what is not its own.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP403",
    "subjects": ["all_reduce"],
    "ranks": [1],
    "severity": "error",
    "cause": "rank 1, collective number 0: all_reduce(float32 of shape (3,)",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def counting(model: nn.Module, batch: Tensor, classes: int) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(classes))
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


broken = Recipe(model=model, batch=batch, loss=lambda model, batch: counting(model, batch, classes=2 + rank()))
fixed = Recipe(model=model, batch=batch, loss=lambda model, batch: counting(model, batch, classes=3))
