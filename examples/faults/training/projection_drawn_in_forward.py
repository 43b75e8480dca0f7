"""A random projection is drawn in the first forward pass, from a generator that is seeded by rank.

Every rank keeps a projection of its own, so the ranks train one set of weights for different models.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP216",
    "subjects": ["projection"],
    "ranks": [],
    "severity": "error",
    "cause": "made in the forward pass",
}


class Net(nn.Module):
    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        if late:
            self.projection = None
        else:
            self.register_buffer("projection", torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        if self.projection is None:
            self.projection = torch.randn(8, 8)
        return self.head((self.body(x) @ self.projection).tanh())


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(late=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(late=False), batch=batch, loss=loss)
