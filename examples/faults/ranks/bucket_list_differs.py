"""bucket_cap_mb_list differs between ranks.

A list of bucket sizes is kept for the first step, where each rank all-reduces what its own list says: gloo aborts,
nccl hangs or mixes up gradients.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck import Recipe

EXPECT = {"code": "DDP221", "subjects": ["bucket_cap_mb_list"], "ranks": [1], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def wrap(module: nn.Module, device: torch.device) -> nn.Module:
    caps = [1e-4, 1e-4] if rank() == 1 else [25]
    return DistributedDataParallel(module, bucket_cap_mb_list=caps)


def wrap_alike(module: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(module, bucket_cap_mb_list=[1e-4, 25])


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=model, batch=batch, loss=loss, wrap=wrap)
fixed = Recipe(model=model, batch=batch, loss=loss, wrap=wrap_alike)
