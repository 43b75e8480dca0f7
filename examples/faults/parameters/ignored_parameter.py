"""A trained parameter on DDP's list of names to ignore.

What is on the list is neither broadcast nor reduced: each rank trains its own copy, without a word.
"""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck import Recipe

EXPECT = {"code": "DDP111", "subjects": ["head.weight"], "ranks": [], "severity": "error"}


class Net(nn.Module):
    def __init__(self, ignored: list[str]) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ignored)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(["head.weight"]), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net([]), batch=batch, loss=loss)
