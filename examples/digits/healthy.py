"""A convolutional network with synchronised BatchNorm on real handwritten digits, trained as it should be.

ddpcheck finds nothing here: two ranks with half of the batch each compute what one process computes with all of it.
"""

from __future__ import annotations

from digits_training import DigitNet, batch, loss, optimizer, wrap

__all__ = ["batch", "loss", "model", "optimizer", "wrap"]


def model() -> DigitNet:
    return DigitNet()
