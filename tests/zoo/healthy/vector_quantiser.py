"""A vector quantiser whose loss begins with a zero that forward makes require grad, and that nobody trains.

The zero is a buffer, as in vector-quantize-pytorch, and a new tensor in each forward, which the module keeps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Quantiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(12, 8)
        self.register_buffer("zero", torch.tensor(0.0), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        commitment = self.zero
        if self.training:
            commitment.requires_grad_()
        self.last = torch.zeros((), requires_grad=True)
        codes = self.codes(torch.cdist(x.detach(), self.codes.weight.detach()).argmin(1))
        commitment = commitment + self.last + F.mse_loss(x, codes.detach()) + F.mse_loss(codes, x.detach())
        return x + (codes - x).detach(), commitment


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.quantiser, self.decoder = nn.Linear(8, 8), Quantiser(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes, commitment = self.quantiser(self.encoder(x))
        return self.decoder(codes), commitment


def model() -> nn.Module:
    return Autoencoder()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    decoded, commitment = model(batch)
    return F.mse_loss(decoded, batch) + commitment
