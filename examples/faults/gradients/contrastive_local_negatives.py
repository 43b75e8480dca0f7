"""A contrastive loss takes its negatives from the local batch.

A rank sees one over the world size of the negatives, so more ranks make the task easier and the loss another.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather

from ddpcheck import Recipe

EXPECT = {"code": "DDP304", "subjects": ["loss"], "ranks": [], "severity": "warning", "cause": "the loss itself"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 8, generator=generator)
    return x, x + 0.1 * torch.randn(12, 8, generator=generator)


def local_negatives(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    left, right = model(torch.cat(batch)).chunk(2)
    return F.cross_entropy(left @ right.T, torch.arange(len(left)))


def global_negatives(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    left, right = model(torch.cat(batch)).chunk(2)
    own = torch.arange(len(left))
    if dist.is_initialized():
        right = torch.cat(all_gather(right))  # its backward brings back the gradients of all ranks
        own = own + dist.get_rank() * len(left)
    return F.cross_entropy(left @ right.T, own)


broken = Recipe(model=model, batch=batch, loss=local_negatives)
fixed = Recipe(model=model, batch=batch, loss=global_negatives)
