"""Every forward seeds torch's generator with the same number on all ranks.

All ranks draw the same dropout masks: less variety than the size of the global batch suggests.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP510",
    "subjects": ["1"],
    "ranks": [],
    "severity": "warning",
    "cause": "dropout_seeded_in_forward.py:27",
}


class Net(nn.Sequential):
    def __init__(self, seed: int | None) -> None:
        super().__init__(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.seed = seed

    def forward(self, x: Tensor) -> Tensor:
        if self.seed is not None:
            torch.manual_seed(self.seed)  # "for reproducibility"
        return super().forward(x)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(17), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(None), batch=batch, loss=loss)
