"""The digits network trained on the sum of the losses of a batch instead of their mean.

DDP averages over ranks, so the sum shrinks with every rank that is added and with it the effective learning rate:
ddpcheck reports DDP305 (loss-normalisation), every gradient at 1/2 of the single process on two ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from digits_training import DigitNet, batch, wrap
from torch import Tensor, nn

__all__ = ["batch", "loss", "model", "optimizer", "wrap"]


def model() -> DigitNet:
    return DigitNet()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="sum")


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1 / 48, momentum=0.9)
