"""Weights in bfloat16 are rounded stochastically with random numbers that differ between ranks.

The updates are equal and are rounded to different neighbours, so the ranks' weights drift apart a bit at a time.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP306",
    "subjects": ["0.weight", "0.bias", "2.weight", "2.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "after the optimizer's step",
}


class RoundingSGD(torch.optim.SGD):
    def __init__(self, parameters, generator: torch.Generator | None) -> None:
        super().__init__(parameters, lr=0.01)
        self.generator = generator

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            exact = parameter.float() - 0.01 * parameter.grad.float()
            dither = torch.randint(0, 1 << 16, exact.shape, generator=self.generator, dtype=torch.int32)
            parameter.copy_(((exact.view(torch.int32) + dither) & -(1 << 16)).view(torch.float32))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).bfloat16()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    weight = next(model.parameters())
    return (model(batch.to(weight.dtype))[:, 0].to(batch.dtype) - batch.sum(1)).square().mean()


def shared(parameters) -> torch.optim.Optimizer:
    return RoundingSGD(parameters, torch.Generator().manual_seed(17))


broken = Recipe(model=model, batch=batch, loss=loss, optimizer=lambda p: RoundingSGD(p, None))
fixed = Recipe(model=model, batch=batch, loss=loss, optimizer=shared)
