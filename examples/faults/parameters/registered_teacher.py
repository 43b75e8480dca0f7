"""An averaged teacher whose copy still requires grad.

deepcopy copies requires_grad as well. The teacher runs under no_grad, so DDP waits for gradients that never come.
"""

import copy

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP103",
    "subjects": ["teacher.weight", "teacher.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "torch.no_grad() at examples/faults/parameters/registered_teacher.py:32",
}


class Net(nn.Module):
    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.student = nn.Linear(8, 8)
        self.teacher = copy.deepcopy(self.student).requires_grad_(not frozen)  # right: requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mean, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mean.lerp_(new, 0.1)
            target = self.teacher(x).tanh()
        return (self.student(x + 0.1).tanh() - 0.9 * target).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


broken = Recipe(model=lambda: Net(frozen=False), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(frozen=True), batch=batch, loss=loss)
