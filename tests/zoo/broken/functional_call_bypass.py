"""DDP501: `functional_call` on the inner module goes past the wrapper."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

EXPECT = {"code": "DDP501", "subjects": [], "ranks": [], "severity": "error"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    inner = getattr(model, "module", model)
    return (functional_call(inner, dict(inner.named_parameters()), (batch,))[:, 0] - batch.sum(1)).square().mean()
