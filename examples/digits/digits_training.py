"""A small convolutional network for handwritten digits, and how it is trained.

`healthy.py` is the recipe as it should be; every other file of this folder changes one thing and is wrong.
The digits are 1797 real ones, scanned at 8 by 8 pixels, that come with scikit-learn.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BATCH_SIZE = 48


class DigitNet(nn.Module):
    """Two convolutions with batch normalisation, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


@cache
def digits() -> tuple[Tensor, Tensor]:
    """All images, scaled to [0, 1], and their labels."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(data.target)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step: the same one, whichever rank asks for it."""
    images, labels = digits()
    chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))[:BATCH_SIZE]
    return images[chosen], labels[chosen]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def wrap(module: nn.Module, device: torch.device) -> nn.Module:
    """Wrap as a training script does, with batch statistics taken over all ranks."""
    return DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(module))
