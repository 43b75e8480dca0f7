"""Contrastive learning against the samples of all ranks, gathered with gradient, with a learnt temperature.

Every rank computes the global loss; the gather returns the sum of all ranks' gradients, and DDP's average undoes it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function


class AllGather(Function):
    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, value.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def gather(value: Tensor) -> Tensor:
    return AllGather.apply(value) if dist.is_available() and dist.is_initialized() else value


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 4)
        self.right = nn.Linear(8, 4)
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left, right = F.normalize(self.left(x), dim=1), F.normalize(self.right(y), dim=1)
        return self.log_scale.exp() * gather(left) @ gather(right).T


def model() -> nn.Module:
    return Contrastive()


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, 1)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(*batch)
    target = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
