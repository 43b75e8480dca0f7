"""A small decoder-only transformer that predicts the next character, and how it is trained.

`healthy.py` is the recipe as it should be; every other file of this folder changes one thing and is wrong.
The text is the prose in which scikit-learn describes its data sets: some 40,000 characters of English that people
wrote, under its BSD licence, on every machine that has the package. So nothing is downloaded, and no text shipped.
"""

from __future__ import annotations

import string
from functools import cache
from importlib.resources import files

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALPHABET = string.printable  # fixed, so that the model does not depend on the version of the text
CONTEXT, WIDTH, HEADS, DEPTH, DROPOUT, BATCH_SIZE = 32, 32, 2, 2, 0.1, 16


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each behind a LayerNorm and with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention_in, self.attention_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward: nn.Module = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(DROPOUT)
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.attention_in(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        dropout = DROPOUT if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm_2(x))


class LanguageModel(nn.Module):
    """Characters in, logits of the next character out; the head shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(ALPHABET), bias=False)
        self.head.weight = self.embedding.weight

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@cache
def corpus() -> Tensor:
    """The whole text as numbers."""
    folder = files("sklearn.datasets") / "descr"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".rst"))
    text = "\n".join((folder / name).read_text(encoding="utf-8") for name in names)
    return torch.tensor([ALPHABET.index(character) for character in text if character in ALPHABET])


def batch(step: int) -> Tensor:
    """The global batch of a step: passages of one character more than the context."""
    text = corpus()
    starts = torch.randint(len(text) - CONTEXT, (BATCH_SIZE, 1), generator=torch.Generator().manual_seed(step))
    return text[starts + torch.arange(CONTEXT + 1)]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
