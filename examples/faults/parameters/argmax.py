"""A gate that chooses by argmax.

argmax has no gradient: the gate decides which head counts and never learns to decide better.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP103",
    "subjects": ["gate.weight", "gate.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "argmax(), which is not differentiable at examples/faults/parameters/argmax.py:31",
}


class Net(nn.Module):
    def __init__(self, *, hard: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.heads = nn.Linear(8, 3)
        self.hard = hard

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        if self.hard:
            weights = F.one_hot(scores.argmax(1), 3)
        else:
            weights = scores.softmax(1)
        return (self.heads(x) * weights).sum(1, keepdim=True)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(hard=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(hard=False), batch=batch, loss=loss)
