"""An auxiliary output that the loss does not use.

Every output of forward that depends on parameters must take part in the loss: DDP waits for their gradients too.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP102",
    "subjects": ["auxiliary.weight", "auxiliary.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "output_not_in_loss.py:29",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.auxiliary = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).tanh()
        return self.head(h), self.auxiliary(h)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss_of_main_output(model: nn.Module, batch: Tensor) -> Tensor:
    main, _ = model(batch)
    return (main[:, 0] - batch.sum(1)).square().mean()


def loss_of_both_outputs(model: nn.Module, batch: Tensor) -> Tensor:
    main, auxiliary = model(batch)
    return (main[:, 0] - batch.sum(1)).square().mean() + 0.1 * (auxiliary[:, 0] - batch.amax(1)).square().mean()


broken = Recipe(model=Net, batch=batch, loss=loss_of_main_output)
fixed = Recipe(model=Net, batch=batch, loss=loss_of_both_outputs)
