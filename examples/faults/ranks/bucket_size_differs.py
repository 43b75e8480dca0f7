"""bucket_cap_mb differs between ranks.

It is correct as long as rank 0's buckets are told to all ranks, which is what DDP does after the first step in the
usual mode, and in no other.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck import Recipe

EXPECT = {"code": "DDP221", "subjects": ["bucket_cap_mb"], "ranks": [1], "severity": "warning"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def wrap(module: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(module, bucket_cap_mb=1 if rank() == 1 else 25)


def wrap_alike(module: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(module, bucket_cap_mb=1)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=model, batch=batch, loss=loss, wrap=wrap)
fixed = Recipe(model=model, batch=batch, loss=loss, wrap=wrap_alike)
