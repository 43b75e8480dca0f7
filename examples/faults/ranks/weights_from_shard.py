"""Whitening weights are computed from each rank's shard and held in a plain list.

Registered weights would be made equal by DDP's broadcast at construction; these are not, so each rank trains behind
another input transform.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP216", "subjects": ["whitening[0]"], "ranks": [1], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def shard_of(rank: int) -> Tensor:
    return torch.randn(64, 8, generator=torch.Generator().manual_seed(rank)) * torch.arange(1.0, 9.0)


class Net(nn.Module):
    def __init__(self, data: Tensor) -> None:
        super().__init__()
        self.whitening = [torch.diag(1 / data.std(0))]  # a list, so that state_dict() stays small
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x @ self.whitening[0])


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(shard_of(rank())), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(shard_of(0)), batch=batch, loss=loss)
