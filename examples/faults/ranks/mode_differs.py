"""One rank is in evaluation mode.

Rank 1 trains without dropout; DDP averages gradients of two different functions. A validation on one rank that
forgets to call train() again does this.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP222",
    "subjects": ["(the model)"],
    "ranks": [1],
    "severity": "error",
    "cause": "rank 1: evaluating",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model(mode: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1)).train(mode)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: model(mode=rank() == 0), batch=batch, loss=loss)
fixed = Recipe(model=lambda: model(mode=True), batch=batch, loss=loss)
