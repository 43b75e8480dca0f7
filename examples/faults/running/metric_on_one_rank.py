"""One rank all-reduces a metric, the others do not.

Logging on rank 0 is right; a collective in it is not. Rank 0's all-reduce meets the other ranks' gradients: a hang,
an abort, or a metric that is added to a gradient.
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
    "cause": "metric_on_one_rank.py:33",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def logging(model: nn.Module, batch: Tensor, only_first: bool) -> Tensor:
    error = (model(batch)[:, 0] - batch.sum(1)).square().mean()
    if dist.is_initialized() and (rank() == 0 or not only_first):
        dist.all_reduce(error.detach().clone())
    return error


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


broken = Recipe(model=model, batch=batch, loss=lambda model, batch: logging(model, batch, True))
fixed = Recipe(model=model, batch=batch, loss=lambda model, batch: logging(model, batch, False))
