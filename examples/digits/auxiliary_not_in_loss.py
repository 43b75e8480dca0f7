"""The digits network with an auxiliary head whose output the loss forgets to add.

The head is called and its output returned, but nothing comes back: ddpcheck reports DDP102
(non-contributing-parameter) for `auxiliary.weight` and `auxiliary.bias`.
"""

from __future__ import annotations

import torch.nn.functional as F
from digits_training import DigitNet, batch, optimizer, wrap
from torch import Tensor, nn

__all__ = ["batch", "loss", "model", "optimizer", "wrap"]


class WithAuxiliary(DigitNet):
    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = nn.Linear(64, 2)  # meant to learn: odd or even?

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(images)
        return self.head(features), self.auxiliary(features)


def model() -> WithAuxiliary:
    return WithAuxiliary()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    logits, _parity = model(images)
    return F.cross_entropy(logits, labels)  # + F.cross_entropy(_parity, labels % 2)
