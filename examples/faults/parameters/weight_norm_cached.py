"""A weight-normalised weight computed once without grad.

The weight is a product of two parameters, recomputed at each use. Cached under no_grad, it is a constant to autograd.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP103",
    "subjects": ["encoder.parametrizations.weight.original0", "encoder.parametrizations.weight.original1"],
    "ranks": [],
    "severity": "error",
    "cause": "torch.no_grad() at examples/faults/parameters/weight_norm_cached.py:31",
}


class Net(nn.Module):
    def __init__(self, *, cached: bool) -> None:
        super().__init__()
        self.encoder = weight_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 1)
        self.cached = cached

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.cached):
            weight = self.encoder.weight
        return self.head(F.linear(x, weight, self.encoder.bias).tanh())


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(cached=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(cached=False), batch=batch, loss=loss)
