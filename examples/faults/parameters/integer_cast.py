"""A value cast to an integer and back.

An integer has no gradient, so the layer that predicts it never learns; a cast back to float does not bring it back.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP103",
    "subjects": ["level.weight", "level.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "long(), which is not differentiable at examples/faults/parameters/integer_cast.py:30",
}


class Net(nn.Module):
    def __init__(self, *, rounded: bool) -> None:
        super().__init__()
        self.level = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.rounded = rounded

    def forward(self, x: Tensor) -> Tensor:
        level = 4 * self.level(x).tanh()
        if self.rounded:
            level = level.long().float()
        return self.head(x + level)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(rounded=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(rounded=False), batch=batch, loss=loss)
