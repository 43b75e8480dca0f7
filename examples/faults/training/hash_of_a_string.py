"""A row of an embedding is chosen by hash(), which is another one on every rank.

Every process has a hash seed of its own: the same word trains another row on each rank, and none in the checkpoint.
"""

import zlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP516",
    "subjects": ["loss"],
    "ranks": [1],
    "severity": "error",
    "cause": "loss on the shard of rank 1",
}

WORDS = ["all", "reduce", "bucket", "rank", "shard", "group", "store", "hook", "step", "loss", "seed", "batch"]


class Net(nn.Module):
    def __init__(self, number: Callable[[str], int]) -> None:
        super().__init__()
        self.number = number
        self.rows = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, words: Tensor) -> Tensor:
        rows = [self.number(WORDS[word]) % 16 for word in words.tolist()]
        return self.head(self.rows(torch.tensor(rows)))


def batch(step: int) -> Tensor:
    return torch.randperm(12, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch / 6).square().mean()


broken = Recipe(model=lambda: Net(hash), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(lambda word: zlib.crc32(word.encode())), batch=batch, loss=loss)
