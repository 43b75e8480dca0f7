"""Stochastic depth by `torch.rand`: a residual branch is left out for some samples, and scaled for the others."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.layer(x).tanh()
        if self.training:
            branch = branch * (torch.rand(len(x), 1, device=x.device) < 0.8) / 0.8
        return x + branch


def model() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
