"""The encoder runs in inference mode.

`torch.inference_mode()` is meant for evaluation: nothing that is computed in it has a gradient, even if cloned later.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP103",
    "subjects": ["encoder.weight", "encoder.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "torch.inference_mode() at examples/faults/parameters/inference_mode.py:29",
}


class Net(nn.Module):
    def __init__(self, *, cut: bool) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode(self.cut):
            h = self.encoder(x).tanh()
        return self.head(h.clone())


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(cut=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(cut=False), batch=batch, loss=loss)
