"""A codebook behind a straight-through estimator that has no loss.

The estimator hands the gradient past the codebook to the encoder. Only a codebook loss moves the code vectors.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP103",
    "subjects": ["codebook.weight"],
    "ranks": [],
    "severity": "error",
    "cause": "detach() at examples/faults/parameters/codebook_without_loss.py:30",
}


class Net(nn.Module):
    def __init__(self, *, with_codebook_loss: bool) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)
        self.codebook = nn.Embedding(16, 4)
        self.with_codebook_loss = with_codebook_loss

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        code = self.codebook(torch.cdist(z, self.codebook.weight).argmin(1))
        straight_through = z + (code - z).detach()
        loss = (self.decoder(straight_through) - x).square().mean()
        return loss + (code - z.detach()).square().mean() if self.with_codebook_loss else loss


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


broken = Recipe(model=lambda: Net(with_codebook_loss=False), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(with_codebook_loss=True), batch=batch, loss=loss)
