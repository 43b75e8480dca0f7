"""A post-accumulate hook rescales the local gradient in place.

It runs before or after DDP's own hook, which copies the gradient: what is averaged is each rank's own rescaled one.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP310",
    "subjects": ["0.weight", "0.bias", "2.weight", "2.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "clip_in_post_accumulate_hook.py:27",
}


def to_unit_length(parameter: Tensor) -> None:
    parameter.grad /= parameter.grad.norm() + 1e-6


def model(hooked: bool) -> nn.Module:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    for parameter in layers.parameters() if hooked else ():
        parameter.register_post_accumulate_grad_hook(to_unit_length)
    return layers


class UnitSGD(torch.optim.SGD):
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            to_unit_length(parameter)  # after backward: the averaged gradient
        return super().step(closure)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: model(hooked=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: model(hooked=False), batch=batch, loss=loss, optimizer=lambda p: UnitSGD(p, lr=0.01))
