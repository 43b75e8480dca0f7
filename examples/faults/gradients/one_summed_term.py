"""One of two terms of the loss is a sum.

Only that term comes out divided by the world size, so the balance of the terms changes with the number of ranks.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP305",
    "subjects": ["loss"],
    "ranks": [],
    "severity": "error",
    "cause": "Term 2 of 2 of the loss (loss['penalty'] at examples/faults/gradients/one_summed_term.py:36) sums",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(x).tanh()
        return code, self.decoder(code)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def summed(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    code, decoded = model(batch)
    return {"reconstruction": (decoded - batch).square().mean(), "penalty": 0.1 * code.square().sum()}


def averaged(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    code, decoded = model(batch)
    return {"reconstruction": (decoded - batch).square().mean(), "penalty": 0.1 * code.square().sum(1).mean()}


broken = Recipe(model=Net, batch=batch, loss=summed)
fixed = Recipe(model=Net, batch=batch, loss=averaged)
