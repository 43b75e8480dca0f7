"""A queue of negatives is filled by each rank from its own shard.

DDP broadcasts the queue before each forward, so every rank contrasts with what rank 0 has seen and the keys of the
other ranks are thrown away: a queue of 1/W of the data.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP215", "subjects": ["queue"], "ranks": [], "severity": "warning"}


class Net(nn.Module):
    def __init__(self, *, gather: bool) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 4)
        self.gather = gather
        self.register_buffer("queue", torch.linspace(-1, 1, 96).view(24, 4))

    def forward(self, x: Tensor) -> Tensor:
        score = self.encoder(x) @ self.queue.clone().T
        keys = x[:, :4].detach()
        if self.gather and dist.is_initialized():
            shards = [torch.empty_like(keys) for _ in range(dist.get_world_size())]
            dist.all_gather(shards, keys)
            keys = torch.cat(shards)
        self.queue.copy_(torch.cat([keys, self.queue])[:24])
        return score.logsumexp(1, keepdim=True)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(gather=False), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(gather=True), batch=batch, loss=loss)
