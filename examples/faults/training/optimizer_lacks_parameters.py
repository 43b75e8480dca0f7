"""The optimizer holds a part of the parameters.

The others get their gradients computed and reduced in every step, and never move.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP504",
    "subjects": ["0.bias", "2.bias"],
    "ranks": [],
    "severity": "warning",
    "cause": "in no group of the optimizer",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def weights_only(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.dim() > 1], lr=0.01, weight_decay=0.1)


def two_groups(parameters) -> torch.optim.Optimizer:
    parameters = list(parameters)
    weights = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1}
    return torch.optim.SGD([weights, {"params": [p for p in parameters if p.dim() < 2]}], lr=0.01)


broken = Recipe(model=model, batch=batch, loss=loss, optimizer=weights_only)
fixed = Recipe(model=model, batch=batch, loss=loss, optimizer=two_groups)
