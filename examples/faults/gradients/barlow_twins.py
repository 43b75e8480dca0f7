"""The cross-correlation of two views (Barlow twins) is that of the local batch.

Its mean, its deviation and its products are those of a shard; the redundancy that is punished depends on the split.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather

from ddpcheck import Recipe

EXPECT = {"code": "DDP304", "subjects": ["loss"], "ranks": [], "severity": "warning", "cause": "the loss itself"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 8, generator=generator)
    return x, x + 0.1 * torch.randn(12, 8, generator=generator)


def barlow(left: Tensor, right: Tensor) -> Tensor:
    left = (left - left.mean(0)) / left.std(0)
    right = (right - right.mean(0)) / right.std(0)
    return (left.T @ right / len(left) - torch.eye(left.shape[1])).square().sum()


def local_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return barlow(*model(torch.cat(batch)).chunk(2))


def global_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    views = model(torch.cat(batch)).chunk(2)
    if dist.is_initialized():
        views = tuple(torch.cat(all_gather(view)) for view in views)
    return barlow(*views)


broken = Recipe(model=model, batch=batch, loss=local_loss)
fixed = Recipe(model=model, batch=batch, loss=global_loss)
