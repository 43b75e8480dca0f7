"""A low-rank adapter merged into the base weight under no_grad.

The forward pass is right, and the adapter, the only part that is meant to learn, never does.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP103",
    "subjects": ["lora_a", "lora_b"],
    "ranks": [],
    "severity": "error",
    "cause": "torch.no_grad() at examples/faults/parameters/lora_merged_without_grad.py:34",
}


class Net(nn.Module):
    def __init__(self, *, merged: bool) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.base.weight.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(2, 8))
        self.lora_b = nn.Parameter(torch.randn(8, 2))
        self.merged = merged

    def forward(self, x: Tensor) -> Tensor:
        if not self.merged:
            return self.base(x) + x @ self.lora_a.T @ self.lora_b.T
        with torch.no_grad():
            weight = self.base.weight + self.lora_b @ self.lora_a
        return F.linear(x, weight, self.base.bias)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(merged=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(merged=False), batch=batch, loss=loss)
