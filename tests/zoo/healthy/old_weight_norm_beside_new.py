"""Weight normalisation of the old kind beside a parametrisation, whose classes torch makes anew for each module."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations


def model() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still in many models
        old = nn.utils.weight_norm(nn.Linear(8, 8))
    return nn.Sequential(old, nn.Tanh(), parametrizations.orthogonal(nn.Linear(8, 8)), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
