"""One rank has a layer that the others do not have.

DDP counts the parameters when it wraps the module and stops with two numbers and no name; with a count that agrees by
chance it averages gradients of different layers.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP201", "subjects": ["debug_head.bias", "debug_head.weight"], "ranks": [1], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Net(nn.Module):
    def __init__(self, *, debug_head: bool) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        if debug_head:
            self.debug_head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        return self.head(hidden) + self.debug_head(hidden) if hasattr(self, "debug_head") else self.head(hidden)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(debug_head=rank() == 1), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(debug_head=True), batch=batch, loss=loss)
