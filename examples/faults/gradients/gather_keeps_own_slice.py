"""A gather without gradient, with the local slice put back among the gathered ones.

The local slice gets the gradient of the local loss only: what the losses of other ranks ask of it is lost.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP309",
    "subjects": ["all_gather"],
    "ranks": [],
    "severity": "error",
    "cause": "gather_keeps_own_slice.py:35",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 8, generator=generator)
    return x, x + 0.1 * torch.randn(12, 8, generator=generator)


def own_slice(local: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local.detach())
    parts[dist.get_rank()] = local
    return parts


def loss(gather):
    def contrast(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        left, right = model(torch.cat(batch)).chunk(2)
        own = torch.arange(len(left))
        if dist.is_initialized():
            right = torch.cat(gather(right))
            own = own + dist.get_rank() * len(left)
        return F.cross_entropy(left @ right.T, own)

    return contrast


broken = Recipe(model=model, batch=batch, loss=loss(own_slice))
fixed = Recipe(model=model, batch=batch, loss=loss(all_gather))
