"""DDP101: the logits are computed from the embedding's weight, and a head that nobody calls is still there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPECT = {"code": "DDP101", "subjects": ["head.weight"], "ranks": [], "severity": "error"}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 20, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.encoder(self.embedding(tokens)), self.embedding.weight)


def model() -> nn.Module:
    return Broken()


def batch(step: int) -> Tensor:
    return torch.randint(20, (12, 8), generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
