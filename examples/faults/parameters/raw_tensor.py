"""A learned prompt that is a tensor and no nn.Parameter.

requires_grad=True makes autograd fill its .grad, but only an nn.Parameter is registered, broadcast and reduced.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP106", "subjects": ["prompt"], "ranks": [], "severity": "error", "cause": "raw_tensor.py:20"}


class Net(nn.Module):
    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        prompt = torch.ones(8, requires_grad=True)
        self.prompt = nn.Parameter(prompt) if registered else prompt

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.body(x) + self.prompt).tanh())


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(registered=False), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(registered=True), batch=batch, loss=loss)
