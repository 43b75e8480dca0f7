"""A learned temperature turned into a number by .item().

A Python number has no gradient: the temperature keeps its first value for ever.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP103",
    "subjects": ["log_temperature"],
    "ranks": [],
    "severity": "error",
    "cause": "item(), which leaves torch at examples/faults/parameters/item.py:30",
}


class Net(nn.Module):
    def __init__(self, *, as_number: bool) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.log_temperature = nn.Parameter(torch.zeros(()))
        self.head = nn.Linear(8, 1)
        self.as_number = as_number

    def forward(self, x: Tensor) -> Tensor:
        temperature = self.log_temperature.exp()
        scale = temperature.item() if self.as_number else temperature
        return self.head((self.body(x) / scale).softmax(1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(as_number=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(as_number=False), batch=batch, loss=loss)
