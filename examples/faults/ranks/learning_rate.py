"""One rank has another learning rate.

A rate that is scaled by what a rank sees of itself (its GPUs, its batch size) differs; equal gradients then make
unequal updates, and the models part.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP223", "subjects": ["group 0 lr"], "ranks": [1], "severity": "error", "cause": "rank 1: 0.02"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def by_rank(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    gpus = 2 if rank() == 1 else 1
    return torch.optim.SGD(parameters, lr=0.01 * gpus)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=model, batch=batch, loss=loss, optimizer=by_rank)
fixed = Recipe(model=model, batch=batch, loss=loss, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
