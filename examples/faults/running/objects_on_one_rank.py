"""Objects are gathered by one rank only.

all_gather_object is two collectives. The rank that calls it alone waits for sizes, and reads gradients in their
place.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP403",
    "subjects": ["all_gather_object"],
    "ranks": [1],
    "severity": "error",
    "cause": "objects_on_one_rank.py",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def gathering(model: nn.Module, batch: Tensor, only_first: bool) -> Tensor:
    if dist.is_initialized() and (rank() == 0 or not only_first):
        names: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(names, {"samples": len(batch)})
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


broken = Recipe(model=model, batch=batch, loss=lambda model, batch: gathering(model, batch, True))
fixed = Recipe(model=model, batch=batch, loss=lambda model, batch: gathering(model, batch, False))
