"""A hook scales the local gradient by a factor that depends on the rank.

The average weighs the ranks by their factors; the loss shows nothing of it.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP310",
    "subjects": ["0.weight", "0.bias", "2.weight", "2.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "scaled_by_rank_in_hook.py:24",
}


def model(factor) -> nn.Module:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    for parameter in layers.parameters():
        parameter.register_hook(lambda gradient: gradient * factor())
    return layers


def of_rank() -> float:
    return 1.0 if not dist.is_initialized() else 0.5 + dist.get_rank()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: model(of_rank), batch=batch, loss=loss)
fixed = Recipe(model=lambda: model(lambda: 0.5), batch=batch, loss=loss)
