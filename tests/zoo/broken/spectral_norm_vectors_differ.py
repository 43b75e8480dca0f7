"""DDP214 as an error: the vectors of a spectral norm differ by rank, and `broadcast_buffers=False` keeps them so."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

EXPECT = {
    "code": "DDP214",
    "subjects": ["parametrizations.weight.0._u", "parametrizations.weight.0._v"],
    "ranks": [1],
    "severity": "error",
}


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


ddp_kwargs = {"broadcast_buffers": False}


def model() -> nn.Module:
    layer = nn.Linear(8, 8)
    torch.manual_seed(rank())
    return spectral_norm(layer, n_power_iterations=1)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch).square().mean()
