"""Two layers share a weight on one rank only.

The rank with the tied weight has one parameter fewer, so DDP stops with two counts; a checkpoint that was loaded on
one rank with assign=True is a usual way to lose a tie.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP209", "subjects": ["decoder.weight", "encoder.weight"], "ranks": [1], "severity": "error"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Net(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.decoder = nn.Linear(8, 8)
        if tied:
            self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x).tanh())


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(tied=rank() == 0), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(tied=True), batch=batch, loss=loss)
