"""The model runs through functional_call on the inner module.

The parameters get their gradients, and the reducer, which the wrapper's forward would have prepared, does nothing.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call

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


def past_the_wrapper(model: nn.Module, batch: Tensor) -> Tensor:
    inner = getattr(model, "module", model)
    prediction = functional_call(inner, dict(inner.named_parameters()), (batch,))
    return (prediction[:, 0] - batch.sum(1)).square().mean()


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=model, batch=batch, loss=past_the_wrapper)
fixed = Recipe(model=model, batch=batch, loss=loss)
