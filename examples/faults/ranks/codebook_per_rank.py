"""A codebook that is learnt by moving averages follows each rank's shard.

Vector-quantising models update their codebook outside autograd. With broadcast_buffers=False each rank quantises with
its own, and decoders trained on one codebook read codes of another.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP214", "subjects": ["codebook"], "ranks": [], "severity": "error"}


class Net(nn.Module):
    def __init__(self, *, reduce: bool) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 2)
        self.head = nn.Linear(2, 1)
        self.reduce = reduce
        self.register_buffer("codebook", torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        codes = nn.functional.one_hot(torch.cdist(hidden.detach(), self.codebook).argmin(1), 3).to(x.dtype)
        quantised = hidden + (codes @ self.codebook - hidden).detach()
        sums = torch.cat([codes.T @ hidden.detach(), codes.sum(0)[:, None]], 1)
        if self.reduce and dist.is_initialized():
            dist.all_reduce(sums)
        self.codebook.lerp_(sums[:, :2] / sums[:, 2:].clamp(min=1), 0.1)
        return self.head(quantised)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(reduce=False), batch=batch, loss=loss, ddp_kwargs={"broadcast_buffers": False})
fixed = Recipe(model=lambda: Net(reduce=True), batch=batch, loss=loss, ddp_kwargs={"broadcast_buffers": False})
