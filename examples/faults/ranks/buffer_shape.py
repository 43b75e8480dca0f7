"""A buffer is longer on one rank.

The longest sequence of a shard sizes the table. Longer than rank 0's, its end is left as it was and nothing is
raised; shorter, the broadcast of the buffers aborts the process.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP213", "subjects": ["table"], "ranks": [1], "severity": "error", "cause": "(12,)"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Net(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.register_buffer("table", torch.linspace(0, 1, length))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh() + self.table[:8])


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(length=12 if rank() == 1 else 10), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(length=12), batch=batch, loss=loss)
