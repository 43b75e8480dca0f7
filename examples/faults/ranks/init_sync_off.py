"""Weights are drawn per rank, and init_sync=False keeps them so.

DDP's broadcast at construction is all that makes weights equal. Without it each rank trains a model of its own with
the average gradient of all.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP208", "subjects": ["0.bias", "0.weight", "2.bias", "2.weight"], "ranks": [1], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: model(seed=rank()), batch=batch, loss=loss, ddp_kwargs={"init_sync": False})
fixed = Recipe(model=lambda: model(seed=0), batch=batch, loss=loss, ddp_kwargs={"init_sync": False})
