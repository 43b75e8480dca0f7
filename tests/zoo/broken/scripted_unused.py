"""DDP101: a layer of a model that TorchScript has compiled is not used."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP101", "subjects": ["unused.weight"], "ranks": [], "severity": "error"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.unused = nn.Linear(8, 1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def model() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still in many models
        return torch.jit.script(Net())


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
