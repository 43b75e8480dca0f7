"""DDP308: noise from the operating system, which no seed fixes: the same run twice differs."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP308", "subjects": [], "ranks": [], "severity": "warning"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "little"))
        return self.head((self.encoder(x) + torch.randn(len(x), 8, generator=noise).to(x)).tanh())


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
