"""The vocabulary is built from each rank's own shard.

The embedding has another length on each rank, so DDP stops when it wraps; where the lengths agree by chance, row 3 is
another word on each rank.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP203",
    "subjects": ["embedding.weight"],
    "ranks": [1],
    "severity": "error",
    "cause": "rank 1: (3, 4)",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


SENTENCES = (("the cat sat on mats", "the mat sat"), ("a dog ran", "a dog"))


class Net(nn.Module):
    def __init__(self, sentences: tuple[str, ...]) -> None:
        super().__init__()
        words = sorted({word for sentence in sentences for word in sentence.split()})
        self.embedding = nn.Embedding(len(words), 4)
        self.head = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        words = x[:, 0].abs().long() % 3  # of a tokenizer, in a real program
        return self.head(torch.cat([x, self.embedding(words)], 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(SENTENCES[rank()]), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(SENTENCES[0] + SENTENCES[1]), batch=batch, loss=loss)
