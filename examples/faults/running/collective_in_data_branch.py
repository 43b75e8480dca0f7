"""A collective is in a branch that depends on the data.

In the second step the batch of one rank holds an outlier and that of the other does not. Only one of them enters the
collective.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP403",
    "subjects": ["all_reduce"],
    "ranks": [0],
    "severity": "error",
    "cause": "in step 1: forward",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    x[8, 0] = 9.0 if step == 1 else x[8, 0]
    return x


def outliers(model: nn.Module, batch: Tensor, always: bool) -> Tensor:
    count = (batch > 5).sum()
    if dist.is_initialized() and (count > 0 or always):
        dist.all_reduce(count)
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=model, batch=batch, loss=lambda model, batch: outliers(model, batch, always=False))
fixed = Recipe(model=model, batch=batch, loss=lambda model, batch: outliers(model, batch, always=True))
