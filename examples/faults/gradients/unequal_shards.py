"""The mean over the local samples, where ranks have different numbers of them.

DDP gives every rank the same weight, so a sample on the rank with fewer samples counts more than one elsewhere.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP305", "subjects": ["loss"], "ranks": [], "severity": "error", "cause": "samples a rank: 7, 6"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(13, 8, generator=torch.Generator().manual_seed(step))


def unequal(batch: Tensor, rank: int, world_size: int) -> Tensor:
    return batch.tensor_split(world_size)[rank]


def errors(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square()


def local_mean(model: nn.Module, batch: Tensor) -> Tensor:
    return errors(model, batch).mean()


def global_mean(model: nn.Module, batch: Tensor) -> Tensor:
    ranks, count = 1, torch.tensor(float(len(batch)))
    if dist.is_initialized():
        ranks = dist.get_world_size()
        dist.all_reduce(count)
    return errors(model, batch).sum() * ranks / count


broken = Recipe(model=model, batch=batch, loss=local_mean, shard=unequal)
fixed = Recipe(model=model, batch=batch, loss=global_mean, shard=unequal)
