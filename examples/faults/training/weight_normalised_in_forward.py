"""Each forward pass replaces the weight by a normalised one, as a new parameter.

DDP keeps to the parameter that it has seen; the new ones are never averaged, and no optimizer holds them.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP503",
    "subjects": ["head.weight"],
    "ranks": [],
    "severity": "error",
    "cause": "replaced in the forward pass of step 0",
}


class Cosine(nn.Module):
    def __init__(self, *, replace: bool) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.replace = replace

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        if self.replace:
            self.head.weight = nn.Parameter(normalize(self.head.weight))
            return self.head(h)
        return linear(h, normalize(self.head.weight), self.head.bias)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Cosine(replace=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Cosine(replace=False), batch=batch, loss=loss)
