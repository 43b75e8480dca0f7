"""BatchNorm without synchronisation.

Each rank normalises with the statistics of its own shard, so what it computes depends on how the batch is split.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP304",
    "subjects": ["norm"],
    "ranks": [],
    "severity": "warning",
    "cause": "batchnorm.py:24",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(12, 1, 6, 6, generator=torch.Generator().manual_seed(step))
    return x, x[:, 0, 0, :3].argmax(1)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


broken = Recipe(model=Net, batch=batch, loss=loss)
fixed = Recipe(model=lambda: nn.SyncBatchNorm.convert_sync_batchnorm(Net()), batch=batch, loss=loss)
