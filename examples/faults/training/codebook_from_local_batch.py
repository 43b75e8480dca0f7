"""A codebook without gradient follows the local batch by a moving average.

DDP never synchronises parameters after construction: each rank quantises with a codebook of its own.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP515",
    "subjects": ["codes"],
    "ranks": [],
    "severity": "error",
    "cause": "The forward or backward pass of step 0 sets codes",
}


class Net(nn.Module):
    def __init__(self, *, synchronise: bool) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)
        self.codes = nn.Parameter(torch.randn(5, 4), requires_grad=False)
        self.synchronise = synchronise

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x).tanh()
        nearest = torch.cdist(hidden, self.codes).argmin(1)
        quantised = hidden + (self.codes[nearest] - hidden).detach()
        if self.training:
            chosen = nn.functional.one_hot(nearest, 5).to(hidden.dtype).detach()
            sums = torch.cat([chosen.sum(0)[:, None], chosen.T @ hidden.detach()], dim=1)
            if self.synchronise and dist.is_initialized():
                dist.all_reduce(sums)
            self.codes.lerp_(sums[:, 1:] / sums[:, :1].clamp(min=1), 0.1)
        return self.decoder(quantised)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch).square().mean()


broken = Recipe(model=lambda: Net(synchronise=False), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(synchronise=True), batch=batch, loss=loss)
