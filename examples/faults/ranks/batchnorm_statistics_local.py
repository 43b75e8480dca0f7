"""BatchNorm statistics are never synchronised, broadcast_buffers=False.

Each rank normalises with its own shard and keeps running statistics of its own, and the checkpoint keeps rank 0's;
evaluation differs between the ranks from then on.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP304", "subjects": ["1"], "ranks": [], "severity": "warning", "cause": "with it comes DDP214"}


def model(norm: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8, bias=False), norm(8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: model(nn.BatchNorm1d), batch=batch, loss=loss, ddp_kwargs={"broadcast_buffers": False})
fixed = Recipe(model=lambda: model(nn.SyncBatchNorm), batch=batch, loss=loss, ddp_kwargs={"broadcast_buffers": False})
