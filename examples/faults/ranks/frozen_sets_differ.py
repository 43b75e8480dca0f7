"""Each rank freezes another layer, as many parameters each.

The counts and shapes that DDP compares agree, so nothing is raised: the gradient of one layer is averaged with that
of another.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP206", "subjects": ["0.weight", "0.bias", "2.weight", "2.bias"], "ranks": [1], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model(frozen: int) -> nn.Module:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    layers[frozen].requires_grad_(False)
    return layers


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: model(frozen=2 * rank()), batch=batch, loss=loss)
fixed = Recipe(model=lambda: model(frozen=0), batch=batch, loss=loss)
