"""One direction of a bidirectional LSTM is sliced away.

Slicing gives the part that is dropped a gradient of zero: DDP has nothing to wait for, and half of the LSTM is idle.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

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
    "cause": "at examples/faults/parameters/lstm_unused_direction.py:33",
}


class Net(nn.Module):
    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(width, 1)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][..., : self.width]).mean(1)


def batch(step: int) -> Tensor:
    return torch.randn(12, 5, 4, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum((1, 2))).square().mean()


broken = Recipe(model=lambda: Net(width=8), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(width=16), batch=batch, loss=loss)
