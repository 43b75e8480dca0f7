"""Power-iteration vectors of a spectral norm differ by rank.

The vectors are buffers, drawn at random. With broadcast_buffers=False each rank divides the same weight by another
estimate of its norm: the ranks compute other functions of equal parameters.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP214",
    "subjects": ["parametrizations.weight.0._u", "parametrizations.weight.0._v"],
    "ranks": [1],
    "severity": "error",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model(seed: int) -> nn.Module:
    layer = nn.Linear(8, 8)
    torch.manual_seed(seed)
    return spectral_norm(layer, n_power_iterations=1)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


broken = Recipe(model=lambda: model(seed=rank()), batch=batch, loss=loss, ddp_kwargs={"broadcast_buffers": False})
fixed = Recipe(model=lambda: model(seed=0), batch=batch, loss=loss, ddp_kwargs={"broadcast_buffers": False})
