"""Cross entropy with class weights, which divides by the weights of the local labels.

The sum of the weights differs between ranks with their labels, and DDP gives every rank the same weight.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP305",
    "subjects": ["loss"],
    "ranks": [],
    "severity": "error",
    "cause": "normalised by a count that differs between ranks",
}
WEIGHTS = torch.tensor([1.0, 5.0, 0.2])


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return x, x[:, :3].argmax(1)


def local_mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, labels = batch
    return F.cross_entropy(model(x), labels, weight=WEIGHTS.to(x.dtype))


def global_mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, labels = batch
    total = F.cross_entropy(model(x), labels, weight=WEIGHTS.to(x.dtype), reduction="sum")
    ranks, weight = 1, WEIGHTS[labels].sum()
    if dist.is_initialized():
        ranks = dist.get_world_size()
        dist.all_reduce(weight)
    return total * ranks / weight


broken = Recipe(model=model, batch=batch, loss=local_mean)
fixed = Recipe(model=model, batch=batch, loss=global_mean)
