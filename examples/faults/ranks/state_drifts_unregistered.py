"""A tensor that no list of DDP knows follows each rank's shard.

A plain attribute is neither broadcast nor saved. Here the scale of the input is a running value of the rank's own
data, so the ranks compute other functions of equal parameters.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP216", "subjects": ["scale"], "ranks": [], "severity": "error"}


class Net(nn.Module):
    def __init__(self, *, follow: bool) -> None:
        super().__init__()
        self.head = nn.Linear(8, 1)
        self.follow = follow
        self.scale = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(x / self.scale)
        if self.follow:
            self.scale = self.scale.lerp(x.detach().std(0), 0.1)
        return y


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(follow=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(follow=False), batch=batch, loss=loss)
