"""A layer is wider on one rank.

DDP compares sizes when it wraps and raises on the rank that differs, without a name; the other ranks see a closed
connection.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP203", "subjects": ["0.weight", "0.bias", "2.weight"], "ranks": [1], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))


def width_that_fits() -> int:
    return 12 if rank() == 1 else 8  # the GPU of one node has more memory


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: model(width_that_fits()), batch=batch, loss=loss)
fixed = Recipe(model=lambda: model(8), batch=batch, loss=loss)
