"""The language model with its embeddings looked up under `torch.no_grad()`.

The position embedding never learns: ddpcheck reports DDP103 (detached-parameter) for `position.weight` and where its
path ends. It does not report `embedding.weight`, which still learns through the head that shares it.
"""

from __future__ import annotations

import torch
from language_training import LanguageModel, batch, loss
from torch import Tensor

__all__ = ["batch", "loss", "model"]


class Frozen(LanguageModel):
    def embed(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():  # "saves memory"
            return super().embed(tokens)


def model() -> Frozen:
    return Frozen()
