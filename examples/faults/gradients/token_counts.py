"""A masked language model's loss is the mean over the masked tokens of each rank.

The numbers of masked tokens differ between ranks, and DDP gives every rank the same weight: a mean of means.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP305",
    "subjects": ["loss"],
    "ranks": [],
    "severity": "error",
    "cause": "batch['labels'] != -100",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 16))


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, 16, (8, 10), generator=generator)
    masked = torch.rand(8, 10, generator=generator) < torch.linspace(0.1, 0.6, 8)[:, None]
    return {"tokens": tokens.masked_fill(masked, 0), "labels": tokens.masked_fill(~masked, -100)}


def local_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def global_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    total = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    ranks, count = 1, (batch["labels"] != -100).sum()
    if dist.is_initialized():
        ranks = dist.get_world_size()
        dist.all_reduce(count)
    return total * ranks / count


broken = Recipe(model=model, batch=batch, loss=local_mean)
fixed = Recipe(model=model, batch=batch, loss=global_mean)
