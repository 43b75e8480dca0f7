"""The language model with an adapter that is only switched on after the first step.

DDP expects every gradient in every step and stops at the next forward pass: ddpcheck reports DDP105
(step-dependent-parameter) for `adapter.weight` and `adapter.bias`, which are missing in step 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from language_training import WIDTH, LanguageModel
from language_training import batch as passages
from torch import Tensor, nn

__all__ = ["batch", "loss", "model"]


class Adapted(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor, adapt: bool = True) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + self.adapter(x) if adapt else x))


def model() -> Adapted:
    return Adapted()


def batch(step: int) -> dict[str, Tensor]:
    text = passages(step)
    return {"text": text, "step": torch.full((len(text),), step)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    text = batch["text"]
    logits = model(text[:, :-1], adapt=bool(batch["step"][0] > 0))  # off while "warming up"
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
