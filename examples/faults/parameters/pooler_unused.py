"""A pooler of the class token that a token classifier does not use.

The encoder of the BERT family computes a pooled output whether or not the task has a use for it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP102",
    "subjects": ["encoder.pooler.weight", "encoder.pooler.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "tanh() at examples/faults/parameters/pooler_unused.py:30",
}


class Encoder(nn.Module):
    def __init__(self, *, with_pooler: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.pooler = nn.Linear(8, 8) if with_pooler else None

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden = self.layer(self.embedding(tokens))
        return hidden, None if self.pooler is None else self.pooler(hidden[:, 0]).tanh()


class TokenClassifier(nn.Module):
    def __init__(self, *, with_pooler: bool) -> None:
        super().__init__()
        self.encoder = Encoder(with_pooler=with_pooler)
        self.head = nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _pooled = self.encoder(tokens)
        return self.head(hidden)


def batch(step: int) -> Tensor:
    return torch.randint(20, (12, 6), generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


broken = Recipe(model=lambda: TokenClassifier(with_pooler=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: TokenClassifier(with_pooler=False), batch=batch, loss=loss)
