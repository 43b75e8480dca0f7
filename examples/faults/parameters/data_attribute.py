"""A layer reads features through .data.

`.data` is a detach that no mode and no dispatcher sees; what is before it never learns.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP103",
    "subjects": ["encoder.weight", "encoder.bias"],
    "ranks": [],
    "severity": "error",
    "cause": ".data at examples/faults/parameters/data_attribute.py:30",
}


class Net(nn.Module):
    def __init__(self, *, cut: bool) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x).tanh()
        if self.cut:
            h = h.data
        return self.head(h)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(cut=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(cut=False), batch=batch, loss=loss)
