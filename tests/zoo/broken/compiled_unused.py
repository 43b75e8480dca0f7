"""DDP101 in a model that model() compiles: the names are those of the code, without `_orig_mod`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP101", "subjects": ["extra.weight", "extra.bias"], "ranks": [], "severity": "error"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.extra = nn.Linear(8, 1)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).tanh())[:, 0]


def model() -> nn.Module:
    compiled: nn.Module = torch.compile(Net(), backend="aot_eager")
    return compiled


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.sum(1)).square().mean()
