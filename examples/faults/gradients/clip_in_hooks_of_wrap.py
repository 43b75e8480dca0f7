"""Hooks that are registered while wrapping clip local gradients before they are averaged.

The mean of clipped gradients is not the clipped mean: the ranks agree, and all of them are wrong.
"""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP310",
    "subjects": ["0.weight", "0.bias", "2.weight", "2.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "clip_in_hooks_of_wrap.py:36",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def wrap_with_hooks(module: nn.Module, device: torch.device) -> nn.Module:
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return DistributedDataParallel(module)


class Clipping(torch.optim.SGD):
    def step(self, closure=None):
        clip_grad_norm_(self.param_groups[0]["params"], 0.1)  # after backward, gradients are those of all ranks
        return super().step(closure)


broken = Recipe(model=model, batch=batch, loss=loss, wrap=wrap_with_hooks)
fixed = Recipe(model=model, batch=batch, loss=loss, optimizer=lambda parameters: Clipping(parameters, lr=0.01))
