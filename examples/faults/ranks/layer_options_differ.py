"""One rank's layer has another option.

Options such as padding, eps and dropout rates are not among what DDP compares. The shapes agree, so nothing is
raised.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP222", "subjects": ["1"], "ranks": [1], "severity": "error", "cause": "eps=0.1"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model(eps: float) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, eps=eps), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: model(eps=0.1 if rank() == 1 else 1e-5), batch=batch, loss=loss)
fixed = Recipe(model=lambda: model(eps=1e-5), batch=batch, loss=loss)
