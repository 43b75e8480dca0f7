"""The language model on sentences of unequal length, with each rank dividing by its own number of characters.

A rank with short sentences counts as much as one with long ones, so characters weigh more on one rank than on another:
ddpcheck reports DDP305 (loss-normalisation). The cure is to divide by the average count over all ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from language_training import BATCH_SIZE, CONTEXT, LanguageModel
from language_training import batch as passages
from torch import Tensor, nn

__all__ = ["batch", "loss", "model"]
PADDING = -100


def model() -> LanguageModel:
    return LanguageModel()


def batch(step: int) -> dict[str, Tensor]:
    text = passages(step)
    inputs, targets = text[:, :-1], text[:, 1:].clone()
    lengths = torch.linspace(CONTEXT, 4, BATCH_SIZE).long()  # sorted, as a sampler that groups by length gives them
    targets[torch.arange(CONTEXT) >= lengths[:, None]] = PADDING
    return {"inputs": inputs, "targets": targets}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["inputs"])
    return F.cross_entropy(
        logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=PADDING
    )  # the rank's own mean
