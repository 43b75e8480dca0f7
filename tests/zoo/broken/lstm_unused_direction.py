"""DDP107: only the forward half of a bidirectional LSTM is used; slicing leaves the other half a zero gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {
    "code": "DDP107",
    "subjects": [
        "lstm.weight_ih_l0_reverse",
        "lstm.weight_hh_l0_reverse",
        "lstm.bias_ih_l0_reverse",
        "lstm.bias_hh_l0_reverse",
    ],
    "ranks": [],
    "severity": "warning",
}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1, :8])


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 5, 4, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum((1, 2))).square().mean()
