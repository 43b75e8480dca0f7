"""A parameter that forward builds again.

nn.Parameter(...) makes a new leaf: the gradient goes to it, and not to the parameter that DDP and the optimizer know.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP103",
    "subjects": ["weight"],
    "ranks": [],
    "severity": "error",
    "cause": "nn.Parameter(), a new leaf at examples/faults/parameters/parameter_rebuilt_in_forward.py:30",
}


class Net(nn.Module):
    def __init__(self, *, rebuilt: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.head = nn.Linear(8, 1)
        self.rebuilt = rebuilt

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight / self.weight.norm()
        if self.rebuilt:
            weight = nn.Parameter(weight)
        return self.head((x @ weight).tanh())


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(rebuilt=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(rebuilt=False), batch=batch, loss=loss)
