"""A tensor hook clips gradients before they are averaged.

Hooks on parameters see the local gradient: each rank clips its own, and the mean of clipped gradients is not the
clipped mean.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP310",
    "subjects": ["0.weight", "0.bias", "2.weight", "2.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "clip_in_tensor_hook.py:24",
}


def model(clip: bool) -> nn.Module:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    for parameter in layers.parameters() if clip else ():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return layers


class ClippedSGD(torch.optim.SGD):
    def step(self, closure=None):
        nn.utils.clip_grad_value_(self.param_groups[0]["params"], 0.1)  # after backward: the averaged gradients
        return super().step(closure)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: model(clip=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: model(clip=False), batch=batch, loss=loss, optimizer=lambda p: ClippedSGD(p, lr=0.01))
