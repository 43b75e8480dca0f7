"""Each rank steps on a part of the parameters, and keeps what it has stepped on for itself."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXPECT = {"code": "DDP223", "subjects": ["group 0 parameters"]}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


class Sharded(torch.optim.SGD):
    """Steps on this rank's part of the parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        super().__init__(self.parameters[dist.get_rank() :: dist.get_world_size()], lr=0.1)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return Sharded(parameters)
