"""DDP503 or DDP301: a layer is unfrozen after wrapping; DDP has no hook on it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": ["DDP503", "DDP301"], "subjects": ["0.weight", "0.bias"], "ranks": [], "severity": "error"}


def model() -> nn.Module:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    layers[0].requires_grad_(False)
    return layers


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def wrap(module: nn.Module, device: torch.device) -> nn.Module:
    wrapped = DistributedDataParallel(module)
    module[0].requires_grad_(True)
    return wrapped
