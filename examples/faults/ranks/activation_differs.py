"""One rank uses another activation.

Parameters agree in every respect, so DDP says nothing: it averages gradients of two different functions.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP222", "subjects": ["1"], "ranks": [1], "severity": "error", "cause": "rank 1: GELU"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), activation, nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: model(nn.GELU() if rank() == 1 else nn.ReLU()), batch=batch, loss=loss)
fixed = Recipe(model=lambda: model(nn.GELU()), batch=batch, loss=loss)
