"""find_unused_parameters=True where every parameter is always used.

DDP walks the autograd graph after every forward and all-reduces a bitmap of used parameters, for nothing.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP109", "subjects": ["find_unused_parameters"], "ranks": [], "severity": "note"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=model, batch=batch, loss=loss, ddp_kwargs={"find_unused_parameters": True})
fixed = Recipe(model=model, batch=batch, loss=loss)
