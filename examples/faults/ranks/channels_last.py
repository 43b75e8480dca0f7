"""The memory format is channels_last on one rank.

DDP compares strides when it wraps and raises a message that prints sizes, which are equal; without that check the
flat memory of the two layouts would be averaged.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP205",
    "subjects": ["0.weight"],
    "ranks": [1],
    "severity": "error",
    "cause": "rank 1: (27, 1, 9, 3)",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model(memory_format: torch.memory_format) -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 1))
    return layers.to(memory_format=memory_format)


def batch(step: int) -> Tensor:
    return torch.randn(12, 3, 6, 6, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.mean((1, 2, 3))).square().mean()


broken = Recipe(
    model=lambda: model(torch.channels_last if rank() == 1 else torch.contiguous_format), batch=batch, loss=loss
)
fixed = Recipe(model=lambda: model(torch.channels_last), batch=batch, loss=loss)
