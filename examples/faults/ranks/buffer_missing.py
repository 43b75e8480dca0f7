"""One rank lacks a buffer.

Buffers are broadcast as a list without names. With one fewer on a rank the sizes do not agree, and gloo aborts the
process without a Python traceback.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP211",
    "subjects": ["offset"],
    "ranks": [1],
    "severity": "error",
    "cause": "offset: only on rank 0",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Net(nn.Module):
    def __init__(self, *, offset: bool) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(8))
        if offset:
            self.register_buffer("offset", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh() * self.scale + getattr(self, "offset", 0))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(offset=rank() == 0), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(offset=True), batch=batch, loss=loss)
