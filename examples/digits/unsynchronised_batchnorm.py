"""The digits network, wrapped without `SyncBatchNorm.convert_sync_batchnorm`.

Each rank normalises with the statistics of its own shard, so the gradients are those of another problem than the one a
single process solves: ddpcheck warns with DDP304 (batch-coupled) and names the first BatchNorm, `features.1`.
"""

from __future__ import annotations

import torch
from digits_training import DigitNet, batch, loss, optimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["batch", "loss", "model", "optimizer", "wrap"]


def model() -> DigitNet:
    return DigitNet()


def wrap(module: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(module)  # BatchNorm stays as it is
