"""A wrapper of one's own averages the weights' gradients and forgets the biases'.

The biases follow the local data, so the ranks' models drift apart slowly.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP301",
    "subjects": ["0.bias", "2.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "2 of 4 parameters",
}


class Averaging(nn.Module):
    def __init__(self, module: nn.Module, smallest: int) -> None:
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            if parameter.dim() >= smallest:
                parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, parameter: Tensor) -> None:
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=model, batch=batch, loss=loss, wrap=lambda module, device: Averaging(module, smallest=2))
fixed = Recipe(model=model, batch=batch, loss=loss, wrap=lambda module, device: Averaging(module, smallest=1))
