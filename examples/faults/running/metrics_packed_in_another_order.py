"""One rank packs its metrics in another order.

The vectors have equal sizes and types, so nothing is raised: what is logged as the worst error of all ranks is the
sum of one rank's worst and another's mean.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP407",
    "subjects": ["all_reduce"],
    "ranks": [1],
    "severity": "error",
    "cause": "metrics_packed_in_another_order.py:35",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def packing(model: nn.Module, batch: Tensor, names: list[str]) -> Tensor:
    error = model(batch)[:, 0] - batch.sum(1)
    metrics = {"absolute": error.abs().mean(), "square": error.square().mean(), "worst": error.abs().max()}
    if dist.is_initialized():
        flat = torch.stack([metrics[name] for name in names]).detach()
        dist.all_reduce(flat)
    return metrics["square"]


def met() -> list[str]:
    names = ["absolute", "square", "worst"]
    return names[::-1] if rank() == 1 else names  # as the keys of a dict, or a set, may come


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


broken = Recipe(model=model, batch=batch, loss=lambda model, batch: packing(model, batch, met()))
fixed = Recipe(model=model, batch=batch, loss=lambda model, batch: packing(model, batch, sorted(met())))
