"""The digits network with a `.detach()` that somebody forgot after an experiment.

The head still learns and the loss still falls, but no convolution gets a gradient: ddpcheck reports DDP103
(detached-parameter) for everything in `features`, and the line of the `.detach()`.
"""

from __future__ import annotations

from digits_training import DigitNet, batch, loss, optimizer, wrap
from torch import Tensor

__all__ = ["batch", "loss", "model", "optimizer", "wrap"]


class Detached(DigitNet):
    def forward(self, images: Tensor) -> Tensor:
        features = self.features(images).detach()  # cuts the path from the loss to the convolutions
        return self.head(features)


def model() -> Detached:
    return Detached()
