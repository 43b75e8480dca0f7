"""static_graph is set on one rank only.

A static graph is reduced in another order and in other buckets from the first step on. gloo aborts the process
without a Python traceback; nccl waits.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck import Recipe

EXPECT = {"code": "DDP221", "subjects": ["static_graph"], "ranks": [1], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def wrap(module: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(module, static_graph=rank() == 1)


def wrap_alike(module: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(module, static_graph=True)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=model, batch=batch, loss=loss, wrap=wrap)
fixed = Recipe(model=model, batch=batch, loss=loss, wrap=wrap_alike)
