"""A compiled model whose first layer is cut off, which static_graph allows for; compiled code gives it zeros."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP103", "subjects": ["first.weight", "first.bias"]}
ddp_kwargs = {"static_graph": True}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x + torch.tanh(self.first(x)).detach())


def model() -> nn.Module:
    return torch.compile(Net(), backend="aot_eager")  # type: ignore[return-value]


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
