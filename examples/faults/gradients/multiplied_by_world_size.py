"""A mean loss is multiplied by the world size.

The factor belongs to sums, whose average over ranks is too small; on a mean the gradient is too large by it.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP303", "subjects": ["loss"], "ranks": [], "severity": "error", "cause": "2 (the world size)"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def errors(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square()


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def mean_times_ranks(model: nn.Module, batch: Tensor) -> Tensor:
    return errors(model, batch).mean() * ranks()


def sum_times_ranks(model: nn.Module, batch: Tensor) -> Tensor:
    return errors(model, batch).sum() * ranks()


broken = Recipe(model=model, batch=batch, loss=mean_times_ranks)
fixed = Recipe(model=model, batch=batch, loss=sum_times_ranks)
