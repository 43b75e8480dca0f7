"""One rank is killed.

The kernel kills what takes too much memory, a scheduler what takes too long. No traceback is left, and the other
ranks wait.
"""

import os
import signal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP404",
    "subjects": ["step 0: forward"],
    "ranks": [1],
    "severity": "error",
    "cause": "SIGKILL",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def ending(model: nn.Module, batch: Tensor) -> Tensor:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(model, batch)


def plain(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


broken = Recipe(model=model, batch=batch, loss=ending)
fixed = Recipe(model=model, batch=batch, loss=plain)
