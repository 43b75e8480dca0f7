"""DDP306: the optimizer adds noise of its own on every rank, so the parameters part after the step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXPECT = {"code": "DDP306", "subjects": [], "ranks": [], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class NoisySGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        noise = torch.Generator().manual_seed(rank())
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=noise).to(parameter))
        return result


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return NoisySGD(parameters, lr=0.01)
