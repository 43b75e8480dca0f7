"""A number that scales the output is advanced on rank 0 alone.

It is no tensor, so that nothing registers, saves or synchronises it, and the ranks train different functions.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP216",
    "subjects": ["temperature"],
    "ranks": [1],
    "severity": "error",
    "cause": "changes in the steps",
}


class Net(nn.Module):
    def __init__(self, *, everywhere: bool) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.everywhere = everywhere
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(torch.tanh(self.body(x))) / self.temperature
        if self.everywhere or not dist.is_initialized() or dist.get_rank() == 0:
            self.temperature *= 0.7
        return y


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(everywhere=False), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(everywhere=True), batch=batch, loss=loss)
