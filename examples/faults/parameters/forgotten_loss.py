"""Two losses are computed and one is added up.

The decoder runs, its loss is computed and logged, and nothing that is differentiated depends on it.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP102",
    "subjects": ["decoder.weight", "decoder.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "mean() at examples/faults/parameters/forgotten_loss.py:39",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 4)
        self.decoder = nn.Linear(4, 8)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(x).tanh()
        return self.head(code)[:, 0], self.decoder(code)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def losses(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    prediction, decoded = model(batch)
    prediction_loss = (prediction - batch.sum(1)).square().mean()
    reconstruction_loss = (decoded - batch).square().mean()
    return prediction_loss, reconstruction_loss


broken = Recipe(model=Net, batch=batch, loss=lambda model, batch: losses(model, batch)[0])
fixed = Recipe(model=Net, batch=batch, loss=lambda model, batch: sum(losses(model, batch)))
