"""DDP209: rank 0 ties the head to the embedding, rank 1 does not, and so has one parameter more."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

EXPECT = {"code": "DDP209", "subjects": ["head.weight"], "ranks": [1], "severity": "error", "also": ["DDP201"]}


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        if rank() == 1:
            self.head.weight = nn.Parameter(self.embedding.weight.detach().clone())
        else:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randint(20, (12, 8), generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
