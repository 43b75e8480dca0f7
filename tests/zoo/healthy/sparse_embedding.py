"""Embeddings with sparse gradients, and an optimizer that takes them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8, sparse=True)
        self.bag = nn.EmbeddingBag(30, 8, mode="sum", sparse=True)
        self.head = nn.Linear(8, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).mean(1) + self.bag(tokens))


def model() -> nn.Module:
    return Sparse()


def batch(step: int) -> Tensor:
    return torch.randint(30, (12, 4), generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 1).square().mean()


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)
