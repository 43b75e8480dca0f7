"""A custom Function that returns None for a parameter's gradient.

DDP's hook fires all the same, so nothing is raised: the parameter never learns.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP108",
    "subjects": ["scale"],
    "ranks": [],
    "severity": "error",
    "cause": "Multiply.backward() at examples/faults/parameters/custom_function_none.py:29",
}


class Multiply(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _x, scale = ctx.saved_tensors
        return gradient * scale, None  # the gradient of scale is forgotten


class RightMultiply(Multiply):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum(0)


class Net(nn.Module):
    def __init__(self, multiply: type[Function]) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 1)
        self.multiply = multiply

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.multiply.apply(self.body(x).tanh(), self.scale))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(Multiply), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(RightMultiply), batch=batch, loss=loss)
