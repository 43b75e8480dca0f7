"""A buffer by which the forward pass multiplies is decayed in place before backward.

Backward needs the values that were there. What autograd tells is a shape; which buffer it was has to be found out.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP311",
    "subjects": ["gate"],
    "ranks": [],
    "severity": "error",
    "cause": "gate was overwritten after the forward pass",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.register_buffer("gate", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x) * self.gate)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def with_decay(model: nn.Module, batch: Tensor) -> Tensor:
    value = loss(model, batch)
    if hasattr(model, "module"):  # of what the wrapper holds
        model.module.gate.mul_(0.9)
    return value


broken = Recipe(model=Net, batch=batch, loss=with_decay)
fixed = Recipe(model=Net, batch=batch, loss=loss)
