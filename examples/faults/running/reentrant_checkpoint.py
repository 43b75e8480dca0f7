"""A layer is in two re-entrant checkpoints.

Each checkpoint runs a backward of its own, so the gradient of the layer arrives twice. DDP takes the first to be all
there is and raises at the second: marked ready only once.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP406",
    "subjects": ["block.weight", "block.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "checkpoint",
}


class Net(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.block = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant).tanh()
        return self.head(x)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(reentrant=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(reentrant=False), batch=batch, loss=loss)
