"""The loss is a sum over the batch.

DDP averages the ranks' gradients, so a sum comes out divided by the world size: the more ranks, the smaller the step.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP305",
    "subjects": ["loss"],
    "ranks": [],
    "severity": "error",
    "cause": "sums over samples, and DDP averages over ranks: its gradient is 1/2",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return x, x[:, :4].argmax(1)


def loss(reduction: str):
    return lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction=reduction)


broken = Recipe(model=model, batch=batch, loss=loss("sum"))
fixed = Recipe(model=model, batch=batch, loss=loss("mean"))
