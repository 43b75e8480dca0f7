"""A buffer that scales the output is advanced on rank 0 alone, before it is used.

DDP broadcasts it before the forward pass, and rank 0 is a step ahead of the others in it.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP215", "subjects": ["calls"], "ranks": [], "severity": "error", "cause": "with it comes DDP516"}


class Net(nn.Module):
    def __init__(self, *, everywhere: bool) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.everywhere = everywhere
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.everywhere or not dist.is_initialized() or dist.get_rank() == 0:
            self.calls += 1
        return self.head(torch.tanh(self.body(x))) * (1 + self.calls)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(everywhere=False), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(everywhere=True), batch=batch, loss=loss)
