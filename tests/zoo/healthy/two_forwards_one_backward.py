"""A siamese network: the wrapper is called twice before one backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    left, right = torch.randn(12, 8, generator=generator), torch.randn(12, 8, generator=generator)
    return left, right, torch.randint(2, (12,), generator=generator) * 2 - 1


def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    left, right, same = batch
    return F.cosine_embedding_loss(model(left), model(right), same, margin=-0.5)
