"""A barrier is entered by one rank only.

Rank 0 saves a checkpoint and waits for the others, which are told of neither. Its barrier meets the next collective
of the other ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP403",
    "subjects": ["barrier"],
    "ranks": [1],
    "severity": "error",
    "cause": "barrier_on_one_rank.py:34",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def saving(model: nn.Module, batch: Tensor, all_wait: bool) -> Tensor:
    if rank() == 0:
        model.state_dict()  # and write it
    if dist.is_initialized() and (rank() == 0 or all_wait):
        dist.barrier()
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


broken = Recipe(model=model, batch=batch, loss=lambda model, batch: saving(model, batch, False))
fixed = Recipe(model=model, batch=batch, loss=lambda model, batch: saving(model, batch, True))
