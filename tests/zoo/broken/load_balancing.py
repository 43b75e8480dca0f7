"""DDP304: the loss that balances experts multiplies means over the batch; the experts couple nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPECT = {"code": "DDP304", "subjects": ["loss"], "ranks": [], "severity": "warning"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.experts = nn.Parameter(torch.randn(2, 8, 8) / 3)
        self.activation = nn.SiLU()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(x).softmax(1)
        chosen = shares.argmax(1)
        order = chosen.argsort(stable=True)  # one expert's samples after the other's
        weights = self.experts[chosen[order]]
        hidden = self.activation(torch.einsum("sij,sj->si", weights, x[order]))
        out = hidden[order.argsort()] * shares.amax(1, keepdim=True)
        balance = (nn.functional.one_hot(chosen, 2).float().mean(0) * shares.mean(0)).sum()
        return out, balance


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(24, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    out, balance = model(batch)
    return (out - batch).square().mean() + balance
