"""zero_grad between backward and step.

The step finds no gradient: the ranks compute and reduce for nothing, and the model never moves.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP517",
    "subjects": ["zero_grad"],
    "ranks": [],
    "severity": "error",
    "cause": "gradients_zeroed_before_step.py:22",
}


class ZeroingSGD(torch.optim.SGD):
    def step(self, closure=None):
        self.zero_grad()
        return super().step(closure)


class SteppingSGD(torch.optim.SGD):
    def step(self, closure=None):
        result = super().step(closure)
        self.zero_grad()
        return result


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=model, batch=batch, loss=loss, optimizer=lambda p: ZeroingSGD(p, lr=0.01))
fixed = Recipe(model=model, batch=batch, loss=loss, optimizer=lambda p: SteppingSGD(p, lr=0.01))
