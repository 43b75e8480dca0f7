"""A soft intersection over union of the whole batch.

Intersection and union of a shard give another quotient than those of the batch; summed over ranks they would not.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from ddpcheck import Recipe

EXPECT = {"code": "DDP304", "subjects": ["loss"], "ranks": [], "severity": "warning", "cause": "the loss itself"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def counts(model: nn.Module, batch: Tensor) -> Tensor:
    mask, target = model(batch), (batch > 0.5).to(batch.dtype)
    common = (mask * target).sum()
    return torch.stack([common, mask.sum() + target.sum() - common])


def local_iou(model: nn.Module, batch: Tensor) -> Tensor:
    common, union = counts(model, batch)
    return 1 - common / union


def global_iou(model: nn.Module, batch: Tensor) -> Tensor:
    both = counts(model, batch)
    common, union = all_reduce(both) if dist.is_initialized() else both
    return 1 - common / union


broken = Recipe(model=model, batch=batch, loss=local_iou)
fixed = Recipe(model=model, batch=batch, loss=global_iou)
