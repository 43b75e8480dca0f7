"""DDP108: the parameter is reached, and the backward of a custom Function returns None for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import Function

EXPECT = {"code": "DDP108", "subjects": ["scale"], "ranks": [], "severity": "error"}


class Multiply(Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale.detach()
        return x * scale

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None  # the gradient of scale is forgotten


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Multiply.apply(self.encoder(x).tanh(), self.scale))


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
