"""Noise comes from the operating system, which no seed fixes.

The same step run twice gives other gradients, so no comparison with a reference means anything.
"""

import os

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP308", "subjects": ["loss"], "ranks": [], "severity": "warning", "cause": "run twice"}


class Net(nn.Module):
    def __init__(self, seed) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.seed = seed

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.Generator().manual_seed(self.seed())
        return self.head((self.body(x) + 0.1 * torch.randn(8, generator=noise)).tanh())


def from_system() -> int:
    return int.from_bytes(os.urandom(7), "little")


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(from_system), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(lambda: 17), batch=batch, loss=loss)
