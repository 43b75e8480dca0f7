"""DDP112: forward returns an object in which DDP finds no tensor, so it takes every parameter for unused."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP112", "subjects": [], "ranks": [], "severity": "error"}


ddp_kwargs = {"find_unused_parameters": True}


class Output:
    def __init__(self, prediction: Tensor) -> None:
        self.prediction = prediction


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Output:
        hidden = self.encoder(x).tanh()
        return Output(self.head(hidden)[:, 0])


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch).prediction - batch.sum(1)).square().mean()
