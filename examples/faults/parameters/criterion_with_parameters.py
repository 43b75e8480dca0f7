"""A loss function with parameters outside the model.

The criterion is not wrapped: each rank has centres of its own, and trains them with its own shard.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP106",
    "subjects": ["criterion.centre"],
    "ranks": [],
    "severity": "error",
    "cause": "criterion_with_parameters.py:39",
}


class ToCentre(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(8))

    def forward(self, features: Tensor) -> Tensor:
        return (features - self.centre).square().mean()


class Net(nn.Module):
    def __init__(self, *, with_criterion: bool) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.criterion = ToCentre() if with_criterion else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.criterion(self.body(x).tanh() + x)


criterion = ToCentre()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


broken = Recipe(model=lambda: Net(with_criterion=False), batch=batch, loss=lambda model, batch: criterion(model(batch)))
fixed = Recipe(model=lambda: Net(with_criterion=True), batch=batch, loss=lambda model, batch: model(batch))
