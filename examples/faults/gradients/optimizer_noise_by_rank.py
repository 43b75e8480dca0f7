"""The optimizer adds different noise on every rank.

Gradients are equal and updates are not, so the parameters part after the first step and never meet again.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP306",
    "subjects": ["0.weight", "0.bias", "2.weight", "2.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "after the optimizer's step",
}


class NoisySGD(torch.optim.SGD):
    def __init__(self, parameters, seed: int) -> None:
        super().__init__(parameters, lr=0.01)
        self.seed = seed

    def step(self, closure=None):
        noise = torch.Generator().manual_seed(self.seed)
        for parameter in self.param_groups[0]["params"]:
            parameter.grad += 0.01 * torch.randn(parameter.shape, generator=noise)
        return super().step(closure)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=model, batch=batch, loss=loss, optimizer=lambda p: NoisySGD(p, seed=dist.get_rank()))
fixed = Recipe(model=model, batch=batch, loss=loss, optimizer=lambda p: NoisySGD(p, seed=0))
