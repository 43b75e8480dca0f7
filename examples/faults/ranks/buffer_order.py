"""Buffers are registered in another order on one rank.

Buffers are broadcast by position: rank 1 receives rank 0's scale as its offset, and nothing is raised.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP212", "subjects": ["offset", "scale"], "ranks": [1], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Net(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        for name in names:
            self.register_buffer(name, torch.full((8,), 0.0 if name == "offset" else 1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh() * self.scale + self.offset)


def listed() -> list[str]:
    return ["scale", "offset"] if rank() == 1 else ["offset", "scale"]


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(listed()), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(sorted(listed())), batch=batch, loss=loss)
