"""forward_sync_buffers is set on one rank only.

One rank enters the broadcast of the buffers before its forward and the others do not; from then on every collective
meets another one.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck import Recipe

EXPECT = {"code": "DDP221", "subjects": ["forward_sync_buffers"], "ranks": [1], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8).eval(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
    )


def wrap(module: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(module, forward_sync_buffers=rank() == 0)


def wrap_alike(module: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(module, forward_sync_buffers=True)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=model, batch=batch, loss=loss, wrap=wrap)
fixed = Recipe(model=model, batch=batch, loss=loss, wrap=wrap_alike)
