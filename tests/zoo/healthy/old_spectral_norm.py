"""Spectral normalisation of the old kind: a hook, two buffers and a plain attribute in place of the weight."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn


def model() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still in many models
        return nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 4))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch[:, :4]).square().mean()
