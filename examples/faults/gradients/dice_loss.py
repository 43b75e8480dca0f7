"""A dice loss over the whole batch.

The quotient of two sums over a shard is not the share of that shard in the quotient over the batch.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP304", "subjects": ["loss"], "ranks": [], "severity": "warning", "cause": "the loss itself"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def batch_dice(model: nn.Module, batch: Tensor) -> Tensor:
    mask, target = model(batch), (batch > 0.5).to(batch.dtype)
    return 1 - 2 * (mask * target).sum() / (mask.sum() + target.sum())


def sample_dice(model: nn.Module, batch: Tensor) -> Tensor:
    mask, target = model(batch), (batch > 0.5).to(batch.dtype)
    return (1 - 2 * (mask * target).sum(1) / (mask.sum(1) + target.sum(1))).mean()


broken = Recipe(model=model, batch=batch, loss=batch_dice)
fixed = Recipe(model=model, batch=batch, loss=sample_dice)
