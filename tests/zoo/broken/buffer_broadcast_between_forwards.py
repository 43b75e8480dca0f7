"""DDP311: the buffer broadcast of a second forward overwrites what the backward of the first one needs.

The first call sets the buffer from its shard and saves it for backward; the broadcast before the second call puts
rank 0's value there and leaves the version counter alone, so autograd does not notice, and rank 1's gradient is wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {
    "code": "DDP311",
    "subjects": ["scale"],
    "ranks": [],
    "severity": "error",
    "also": ["DDP302", "DDP304", "DDP214", "DDP215"],
}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor, update: bool) -> Tensor:
        if update:
            self.scale.copy_(x.detach().std(0) + 0.5)
        return self.head(self.encoder(x).tanh() * self.scale)


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    prediction = model(batch, update=True) + model(batch.flip(1), update=False)
    return (prediction - batch.sum(1, keepdim=True)).square().mean()
