"""A weight is scaled in place between the forward pass and backward.

Under DDP's next forward or backward autograd finds another version of what it saved, or, past the version counter,
computes with the wrong values.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP311", "subjects": ["2.weight"], "ranks": [], "severity": "error", "cause": "inplace operation"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def with_decay(model: nn.Module, batch: Tensor) -> Tensor:
    value = loss(model, batch)
    if hasattr(model, "module"):  # "weight decay" by hand, of what the wrapper holds
        with torch.no_grad():
            model.module[2].weight.mul_(0.999)
    return value


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=model, batch=batch, loss=with_decay)
fixed = Recipe(model=model, batch=batch, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.1))
