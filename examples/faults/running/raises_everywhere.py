"""Every rank raises the same exception.

No fault of data parallelism: the recipe fails by itself. It is told once, with the user's line, and as the target's
own failure (exit code 3).
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP401",
    "subjects": ["step 0: forward"],
    "ranks": [],
    "severity": "error",
    "cause": "raises_everywhere.py:26",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def raising(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch), torch.zeros(len(batch) + 1, dtype=torch.long))


def plain(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


broken = Recipe(model=model, batch=batch, loss=raising)
fixed = Recipe(model=model, batch=batch, loss=plain)
