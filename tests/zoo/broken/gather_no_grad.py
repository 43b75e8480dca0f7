"""DDP309: a contrastive loss over all ranks, gathered by a collective that autograd does not see."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

EXPECT = {"code": "DDP309", "subjects": ["all_gather"], "ranks": [], "severity": "warning"}


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
        left, right = F.normalize(self.left(x), dim=1), F.normalize(self.right(x.roll(1, 1)), dim=1)
        return gather(left) @ gather(right).T


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = 3 * model(batch)
    return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))
