"""Every rank computes the loss of the gathered batch, and its gradient keeps the own slice only.

Such a gradient is one over the world size of the global batch's once DDP has averaged. The gather of
torch.distributed.nn adds up what all ranks send back, which makes up for it.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP303",
    "subjects": ["loss"],
    "ranks": [],
    "severity": "error",
    "cause": "1/2 (one over the world size)",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 8, generator=generator)
    return x, x + 0.1 * torch.randn(12, 8, generator=generator)


class OwnSlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local: Tensor):
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local)
        return tuple(parts)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        return gradients[dist.get_rank()]


def loss(gather):
    def contrast(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        left, right = model(torch.cat(batch)).chunk(2)
        if dist.is_initialized():
            left, right = torch.cat(gather(left)), torch.cat(gather(right))
        return F.cross_entropy(left @ right.T, torch.arange(len(left)))

    return contrast


broken = Recipe(model=model, batch=batch, loss=loss(OwnSlice.apply))
fixed = Recipe(model=model, batch=batch, loss=loss(all_gather))
