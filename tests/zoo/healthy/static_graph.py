"""`static_graph=True` on a graph that is static, with a layer that is used twice."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ddp_kwargs = {"static_graph": True}


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.layer(x).tanh()).tanh())


def model() -> nn.Module:
    return Twice()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
