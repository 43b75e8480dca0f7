"""A re-entrant checkpoint around the first layer.

A re-entrant checkpoint differentiates only if one of its inputs requires grad. The data does not, so the layer's
parameters get nothing; torch warns once, and goes on.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP103",
    "subjects": ["stem.weight", "stem.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "re-entrant checkpoint of which no input requires grad",
}


class Net(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.stem, x, use_reentrant=self.reentrant).tanh())


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(reentrant=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(reentrant=False), batch=batch, loss=loss)
