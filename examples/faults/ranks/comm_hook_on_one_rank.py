"""A communication hook is registered on one rank only.

The hook all-reduces float16, the reducer of the other ranks float32: the same collective with other sizes. gloo
aborts the process; nccl mixes up numbers or waits.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP221",
    "subjects": ["communication hook"],
    "ranks": [1],
    "severity": "error",
    "cause": "fp16_compress_hook",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def wrap(module: nn.Module, device: torch.device, compressed: bool) -> nn.Module:
    wrapped = DistributedDataParallel(module)
    if compressed:
        wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=model, batch=batch, loss=loss, wrap=lambda module, device: wrap(module, device, rank() == 1))
fixed = Recipe(model=model, batch=batch, loss=loss, wrap=lambda module, device: wrap(module, device, True))
