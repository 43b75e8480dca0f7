"""The loss is divided by the world size.

DDP divides already: every gradient is too small by a factor of the world size, and nothing is raised.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP303",
    "subjects": ["loss"],
    "ranks": [],
    "severity": "error",
    "cause": "1/2 (one over the world size)",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def divided(model: nn.Module, batch: Tensor) -> Tensor:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return loss(model, batch) / ranks


broken = Recipe(model=model, batch=batch, loss=divided)
fixed = Recipe(model=model, batch=batch, loss=loss)
