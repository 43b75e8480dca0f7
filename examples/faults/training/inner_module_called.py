"""The loss calls the module inside the wrapper.

DDP prepares its reducer in its own forward, so nothing is averaged and nothing is raised.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP501",
    "subjects": ["forward"],
    "ranks": [],
    "severity": "error",
    "cause": "calls the wrapped module and not the wrapper",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def past_the_wrapper(model: nn.Module, batch: Tensor) -> Tensor:
    return loss(getattr(model, "module", model), batch)


broken = Recipe(model=model, batch=batch, loss=past_the_wrapper)
fixed = Recipe(model=model, batch=batch, loss=loss)
