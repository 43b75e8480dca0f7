"""A convolutional network whose BatchNorm takes its statistics over all ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 4),
        nn.BatchNorm1d(4),
    )


def batch(step: int) -> Tensor:
    return torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.mean((1, 2, 3))[:, None]).square().mean()


def wrap(module: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(module))
