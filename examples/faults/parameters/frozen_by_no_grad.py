"""A backbone frozen by no_grad alone.

Its parameters still require grad, so DDP puts them into buckets and waits for gradients that never come.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP103",
    "subjects": ["backbone.0.weight", "backbone.0.bias", "backbone.2.weight", "backbone.2.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "torch.no_grad() at examples/faults/parameters/frozen_by_no_grad.py:30",
}


class Net(nn.Module):
    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        if frozen:
            self.backbone.requires_grad_(False)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(features)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(frozen=False), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(frozen=True), batch=batch, loss=loss)
