"""One rank raises an exception.

The other ranks wait in backward for gradients that never come, and fail later, if at all, with a message on a closed
connection.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP401",
    "subjects": ["step 0: forward"],
    "ranks": [1],
    "severity": "error",
    "cause": "raises_on_one_rank.py:32",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def raising(model: nn.Module, batch: Tensor) -> Tensor:
    if rank() == 1:
        raise ValueError("a corrupt record in this rank's shard")
    return plain(model, batch)


def plain(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


broken = Recipe(model=model, batch=batch, loss=raising)
fixed = Recipe(model=model, batch=batch, loss=plain)
