"""The digits network with a second head that was left behind: built, registered, never called.

DDP waits for gradients that never come, and ddpcheck reports DDP101 (unused-parameter) for `old_head.weight` and
`old_head.bias`, with the line that makes them.
"""

from __future__ import annotations

from digits_training import DigitNet, batch, loss, optimizer, wrap
from torch import nn

__all__ = ["batch", "loss", "model", "optimizer", "wrap"]


class TwoHeads(DigitNet):
    def __init__(self) -> None:
        super().__init__()
        self.old_head = nn.Linear(64, 10)  # nothing calls it


def model() -> TwoHeads:
    return TwoHeads()
