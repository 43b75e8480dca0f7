"""The loss has a factor that depends on the rank.

DDP weighs all ranks alike, so the samples of the rank with the smaller factor count less.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP303", "subjects": ["loss"], "ranks": [], "severity": "error", "cause": "by 0.5, 0.25"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def warmed_up_on_rank_0(model: nn.Module, batch: Tensor) -> Tensor:
    late = dist.is_initialized() and dist.get_rank() > 0
    return loss(model, batch) * (0.5 if late else 1.0)


broken = Recipe(model=model, batch=batch, loss=warmed_up_on_rank_0)
fixed = Recipe(model=model, batch=batch, loss=loss)
