"""Two collectives are called in another order on one rank.

Collectives are matched by order, not by name. Of equal sizes nothing is raised: the sum of the losses becomes a count
on one rank and the count a loss.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP403",
    "subjects": ["all_reduce", "broadcast"],
    "ranks": [1],
    "severity": "error",
    "cause": "rank 1, collective number 0: broadcast",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def logging(model: nn.Module, batch: Tensor, swapped: bool) -> Tensor:
    error = (model(batch)[:, 0] - batch.sum(1)).square().mean()
    if dist.is_initialized():
        total, best = error.detach().clone(), torch.zeros(1)
        calls = [lambda: dist.all_reduce(total), lambda: dist.broadcast(best, src=0)]
        for call in reversed(calls) if swapped else calls:
            call()
    return error


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


broken = Recipe(model=model, batch=batch, loss=lambda model, batch: logging(model, batch, swapped=rank() == 1))
fixed = Recipe(model=model, batch=batch, loss=lambda model, batch: logging(model, batch, swapped=False))
