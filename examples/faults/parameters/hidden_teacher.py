"""A teacher hidden in a list that still receives gradients.

The list keeps the copy out of parameters() and out of DDP, but not out of autograd: every rank computes gradients for
it that nobody averages.
"""

import copy

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP106",
    "subjects": ["hidden[0].weight", "hidden[0].bias"],
    "ranks": [],
    "severity": "error",
    "cause": "hidden_teacher.py:27",
}


class Net(nn.Module):
    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.student = nn.Linear(8, 8)
        self.hidden = [copy.deepcopy(self.student).requires_grad_(not frozen)]

    def forward(self, x: Tensor) -> Tensor:
        return (self.student(x + 0.1).tanh() - self.hidden[0](x).tanh()).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


broken = Recipe(model=lambda: Net(frozen=False), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(frozen=True), batch=batch, loss=loss)
