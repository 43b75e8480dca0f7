"""Detached features behind find_unused_parameters=True.

The option keeps DDP from raising. What is left is an encoder that silently never learns.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP103",
    "subjects": ["encoder.weight", "encoder.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "find_unused_parameters=True keeps DDP from stopping",
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
            h = h.detach()
        return self.head(h)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(cut=True), batch=batch, loss=loss, ddp_kwargs={"find_unused_parameters": True})
fixed = Recipe(model=lambda: Net(cut=False), batch=batch, loss=loss)
