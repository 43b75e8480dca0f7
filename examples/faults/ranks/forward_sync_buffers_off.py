"""A counter of seen samples drifts apart, forward_sync_buffers=False.

Unlike broadcast_buffers=False the option leaves the synchronisation at construction alone, so the buffers start equal
and part with the first step.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP214", "subjects": ["seen"], "ranks": [], "severity": "warning"}


class Net(nn.Module):
    def __init__(self, *, total: bool) -> None:
        super().__init__()
        self.head = nn.Linear(8, 1)
        self.total = total
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        seen = (x[:, 0] > 0).sum()
        if self.total and dist.is_initialized():
            dist.all_reduce(seen)
        self.seen += seen
        return self.head(x)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(total=False), batch=batch, loss=loss, ddp_kwargs={"forward_sync_buffers": False})
fixed = Recipe(model=lambda: Net(total=True), batch=batch, loss=loss, ddp_kwargs={"forward_sync_buffers": False})
