"""Parameters are float64 on one rank.

DDP does not compare dtypes. The broadcast of the parameters then reads another number of bytes, and gloo aborts the
process without a Python traceback.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP204", "subjects": ["0.weight", "0.bias", "2.weight", "2.bias"], "ranks": [1], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    dtype = next(model.parameters()).dtype
    return (model(batch.to(dtype))[:, 0] - batch.sum(1).to(dtype)).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


broken = Recipe(model=lambda: model(torch.float64 if rank() == 1 else torch.float32), batch=batch, loss=loss)
fixed = Recipe(model=lambda: model(torch.float32), batch=batch, loss=loss)
