"""A compiled forward with another operation on rank 1, which gives the same values: the ranks run other code."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

EXPECT = {"code": "DDP522", "subjects": ["Net.forward"], "ranks": [1], "severity": "warning"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        alone = not dist.is_initialized() or dist.get_rank() == 0
        return self.second(hidden.relu() if alone else hidden.clamp(min=0.0))


def model() -> nn.Module:
    return torch.compile(Net(), backend="aot_eager")  # type: ignore[return-value]


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
