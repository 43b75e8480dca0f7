"""Batch-hard triplet mining among the local samples.

The hardest positive and negative of a shard are not those of the batch, so mining weakens as ranks are added.
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
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return x, torch.arange(12) % 3


def hardest(codes: Tensor, labels: Tensor) -> Tensor:
    distance = (codes[:, None] - codes).square().sum(2)
    same = labels[:, None] == labels
    positive = distance.where(same, torch.zeros_like(distance)).amax(1)
    negative = distance.where(~same, torch.full_like(distance, 1e6)).amin(1)
    return (positive - negative + 1).relu().mean()


def local_mining(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return hardest(model(batch[0]), batch[1])


def global_mining(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    codes, labels = model(batch[0]), batch[1]
    if dist.is_initialized():
        codes, labels = torch.cat(all_gather(codes)), torch.cat(all_gather(labels))
    return hardest(codes, labels)


broken = Recipe(model=model, batch=batch, loss=local_mining)
fixed = Recipe(model=model, batch=batch, loss=global_mining)
