"""A wrapper of one's own reduces gradients by their maximum instead of their mean.

All ranks get the same gradient, and it is no gradient of the loss.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP302",
    "subjects": ["0.weight", "0.bias", "2.weight", "2.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "not the average of the ranks' own gradients",
}


class Reducing(nn.Module):
    def __init__(self, module: nn.Module, operation: dist.ReduceOp) -> None:
        super().__init__()
        self.module, self.operation = module, operation
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, parameter: Tensor) -> None:
        dist.all_reduce(parameter.grad, op=self.operation)
        if self.operation == dist.ReduceOp.SUM:
            parameter.grad /= dist.get_world_size()

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=model, batch=batch, loss=loss, wrap=lambda module, _: Reducing(module, dist.ReduceOp.MAX))
fixed = Recipe(model=model, batch=batch, loss=loss, wrap=lambda module, _: Reducing(module, dist.ReduceOp.SUM))
