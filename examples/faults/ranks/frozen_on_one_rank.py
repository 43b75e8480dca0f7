"""One rank freezes a layer that the others train.

DDP stops when it wraps the module and prints two counts; it names no parameter.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP206", "subjects": ["0.weight", "0.bias"], "ranks": [1], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model(frozen: bool) -> nn.Module:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    layers[0].requires_grad_(not frozen)
    return layers


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: model(frozen=rank() == 1), batch=batch, loss=loss)
fixed = Recipe(model=lambda: model(frozen=True), batch=batch, loss=loss)
