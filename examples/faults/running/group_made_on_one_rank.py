"""A process group is made by its members only.

new_group is a collective of all ranks, also of those that are not in the group. The members wait for the others,
which are training already.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP403",
    "subjects": ["new_group"],
    "ranks": [1],
    "severity": "error",
    "timeout": 6,
    "cause": "group_made_on_one_rank.py",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def grouping(model: nn.Module, batch: Tensor, everyone: bool) -> Tensor:
    if dist.is_initialized() and (rank() == 0 or everyone):
        dist.new_group([0])  # to save from
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


broken = Recipe(model=model, batch=batch, loss=lambda model, batch: grouping(model, batch, False))
fixed = Recipe(model=model, batch=batch, loss=lambda model, batch: grouping(model, batch, True))
