"""Advantages are normalised with the mean and deviation of the local batch.

The same action gets another weight on another rank, or with another number of ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP304", "subjects": ["loss"], "ranks": [], "severity": "warning", "cause": "the loss itself"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4), nn.LogSoftmax(1))


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    seen = torch.randn(12, 8, generator=generator)
    return {"seen": seen, "action": seen[:, :4].argmax(1), "advantage": torch.randn(12, generator=generator).exp()}


def moments(advantage: Tensor) -> Tensor:
    return torch.stack([torch.ones_like(advantage).sum(), advantage.sum(), advantage.square().sum()])


def policy_loss(model: nn.Module, batch: dict[str, Tensor], sums: Tensor) -> Tensor:
    mean = sums[1] / sums[0]
    deviation = (sums[2] / sums[0] - mean.square()).sqrt()
    chosen = model(batch["seen"]).gather(1, batch["action"][:, None])[:, 0]
    return -(chosen * (batch["advantage"] - mean) / deviation).mean()


def local_moments(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return policy_loss(model, batch, moments(batch["advantage"]))


def global_moments(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    sums = moments(batch["advantage"])
    if dist.is_initialized():
        dist.all_reduce(sums)  # data, which needs no gradient
    return policy_loss(model, batch, sums)


broken = Recipe(model=model, batch=batch, loss=local_moments)
fixed = Recipe(model=model, batch=batch, loss=global_moments)
