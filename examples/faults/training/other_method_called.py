"""The loss calls another method of the module than forward, through the inner module.

The wrapper has no such method, and calling it on the inner module leaves DDP out.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP501",
    "subjects": ["forward"],
    "ranks": [],
    "severity": "error",
    "cause": "calls the wrapped module and not the wrapper",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())

    def training_loss(self, x: Tensor) -> Tensor:
        return (self(x)[:, 0] - x.sum(1)).square().mean()


class LossInForward(Net):
    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x)[:, 0] - x.sum(1)).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def by_method(model: nn.Module, batch: Tensor) -> Tensor:
    return getattr(model, "module", model).training_loss(batch)


broken = Recipe(model=Net, batch=batch, loss=by_method)
fixed = Recipe(model=LossInForward, batch=batch, loss=lambda model, batch: model(batch))
