"""Layers are made in the order of a set of names.

Every process hashes strings in its own way, so the set has another order on every rank. DDP pairs parameters by
position: where the shapes are equal, each layer is trained with the gradient of another one.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP202",
    "subjects": [
        "projections.key.weight",
        "projections.key.bias",
        "projections.query.weight",
        "projections.query.bias",
    ],
    "ranks": [1],
    "severity": "error",
    "cause": "parameter_order_from_a_set.py:32",
}


class Net(nn.Module):
    def __init__(self, *, ordered: bool) -> None:
        super().__init__()
        names = {"query", "key", "value"}
        self.projections = nn.ModuleDict()
        for name in sorted(names) if ordered else names:
            self.projections[name] = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self.projections[name](x) for name in ("query", "key", "value"))
        return self.head((query * key).sigmoid() * value)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(ordered=False), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(ordered=True), batch=batch, loss=loss)
