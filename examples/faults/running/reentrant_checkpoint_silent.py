"""A layer is in two re-entrant checkpoints, and DDP says nothing.

Nothing that is trained comes before the checkpoints. DDP reduces the layer's gradient when the first part of it has
arrived and adds the second part, unreduced, afterwards (pytorch#109191).
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
        self.block = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant).tanh()
        return self.head(x)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(reentrant=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(reentrant=False), batch=batch, loss=loss)
