"""A tensor attribute, neither parameter nor buffer, differs between ranks.

DDP synchronises what is registered and nothing else. What each rank computed from its own files stays its own.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP216", "subjects": ["scale"], "ranks": [1], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Net(nn.Module):
    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        scale = torch.full((8,), 1.0 + rank())
        if registered:
            self.register_buffer("scale", scale)  # DDP gives every rank rank 0's
        else:
            self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh() * self.scale)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(registered=False), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(registered=True), batch=batch, loss=loss)
