"""A gate computed in numpy.

numpy knows nothing of autograd: a value that goes through it comes back as a constant.
"""

import numpy
import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP103",
    "subjects": ["gate.weight", "gate.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "numpy(), which leaves torch at examples/faults/parameters/through_numpy.py:31",
}


class Net(nn.Module):
    def __init__(self, *, in_numpy: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.in_numpy = in_numpy

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        if self.in_numpy:
            gate = torch.from_numpy(numpy.tanh(gate.detach().numpy()))
        else:
            gate = gate.tanh()
        return self.head(x * gate)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(in_numpy=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(in_numpy=False), batch=batch, loss=loss)
