"""Each rank builds adapters for the domains in its own data.

The counts and shapes may agree, and then the adapter for news on one rank is averaged with the adapter for law on the
other.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP201",
    "subjects": ["adapters.law.bias", "adapters.law.weight", "adapters.news.bias", "adapters.news.weight"],
    "ranks": [1],
    "severity": "error",
    "cause": "adapters.law.bias: only on rank 1",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


DOMAINS = ("news", "law")


class Net(nn.Module):
    def __init__(self, domains: tuple[str, ...]) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict({domain: nn.Linear(8, 8) for domain in domains})
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(sum(adapter(x).tanh() for adapter in self.adapters.values()))


def domains_in_shard() -> tuple[str, ...]:
    return (DOMAINS[rank()],)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(domains_in_shard()), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(DOMAINS), batch=batch, loss=loss)
