"""A custom autograd Function normalises the gradient that passes through it.

Its backward divides by the norm over the local batch, which differs between ranks and from that of the global batch.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP310",
    "subjects": ["body.weight", "body.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "clip_in_autograd_function.py:25",
}


class Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


class PerSample(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * 0.1  # the same factor for every sample, wherever it is


class Net(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function.apply(self.body(x).tanh()))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(Normalised), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(PerSample), batch=batch, loss=loss)
