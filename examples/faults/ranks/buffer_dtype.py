"""A buffer has another dtype on one rank.

A counter that one rank keeps as float and another as int has the same number of elements and another number of bytes:
the broadcast aborts, or mixes up bits.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP213", "subjects": ["table"], "ranks": [1], "severity": "error", "cause": "float64"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.register_buffer("table", torch.linspace(0, 1, 8, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh() + self.table.to(x.dtype))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(torch.float64 if rank() == 1 else torch.float32), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(torch.float32), batch=batch, loss=loss)
