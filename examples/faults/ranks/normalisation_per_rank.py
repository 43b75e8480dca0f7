"""Each rank normalises with statistics of only its files, held as numbers.

Plain numbers are neither broadcast nor compared. Every rank trains on another input distribution, and only rank 0's
numbers are in the checkpoint's configuration.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP516", "subjects": ["mean"], "ranks": [1], "severity": "error", "cause": "rank 1: 0.5"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Net(nn.Module):
    def __init__(self, mean: float) -> None:
        super().__init__()
        self.mean = mean
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x - self.mean).tanh())


def mean_of_own_files() -> float:
    return 0.5 * rank()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(mean_of_own_files()), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(0.25), batch=batch, loss=loss)
