"""DDP309: own queries against the keys of all ranks, which a collective without gradient gathers."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

EXPECT = {"code": "DDP309", "subjects": [], "ranks": [], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather(value: Tensor) -> Tensor:
    if not (dist.is_available() and dist.is_initialized()):
        return value
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, value.detach().contiguous())
    parts[dist.get_rank()] = value  # only the own part keeps its gradient
    return torch.cat(parts)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.left(x), dim=1) @ gather(F.normalize(self.right(x.roll(1, 1)), dim=1)).T


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = 3 * model(batch)
    own = torch.arange(len(logits), device=logits.device) + rank() * len(logits)
    return F.cross_entropy(logits, own)
