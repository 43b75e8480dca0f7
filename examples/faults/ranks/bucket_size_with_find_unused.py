"""bucket_cap_mb differs between ranks under find_unused_parameters.

With find_unused_parameters DDP keeps the buckets that each rank made at construction: the ranks all-reduce other
sizes, and gloo aborts the process.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck import Recipe

EXPECT = {"code": "DDP221", "subjects": ["bucket_cap_mb"], "ranks": [1], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def wrap(module: nn.Module, device: torch.device) -> nn.Module:
    cap = 1e-4 if rank() == 1 else 25
    return DistributedDataParallel(module, bucket_cap_mb=cap, find_unused_parameters=True)


def wrap_alike(module: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(module, bucket_cap_mb=25)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=model, batch=batch, loss=loss, wrap=wrap)
fixed = Recipe(model=model, batch=batch, loss=loss, wrap=wrap_alike)
