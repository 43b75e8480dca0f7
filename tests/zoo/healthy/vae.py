"""A variational auto-encoder: its noise comes from torch's generator, not from the batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.decoder = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(code), mean, log_variance


def model() -> nn.Module:
    return Variational()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    decoded, mean, log_variance = model(batch)
    divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum(1) / 2
    return ((decoded - batch).square().sum(1) + divergence).mean()
