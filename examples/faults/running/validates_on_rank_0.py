"""Rank 0 alone validates, through the wrapper.

Every forward of DistributedDataParallel broadcasts the buffers from rank 0, in eval mode and without gradients, too:
rank 0 waits in it, or pairs it with the gradients of the others, and gloo aborts. Validate with the module in it.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP403",
    "subjects": ["DistributedDataParallel.forward"],
    "ranks": [1],
    "severity": "error",
    "cause": "without gradients",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x * self.scale).tanh())


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def error(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def validating(model: nn.Module, batch: Tensor) -> Tensor:
    if dist.is_initialized() and dist.get_rank() == 0:
        with torch.no_grad():
            error(model, batch)
    return error(model, batch)


def validating_inside(model: nn.Module, batch: Tensor) -> Tensor:
    if dist.is_initialized() and dist.get_rank() == 0:
        with torch.no_grad():
            error(getattr(model, "module", model), batch)
    return error(model, batch)


broken = Recipe(model=Net, batch=batch, loss=validating)
fixed = Recipe(model=Net, batch=batch, loss=validating_inside)
