"""The digits network with a head that rank 1 never calls, because an `if rank == 0` meant for logging holds too much.

Rank 0 waits in backward for a gradient that rank 1 does not have: ddpcheck reports DDP104 (rank-dependent-parameter)
for `confidence.weight` and `confidence.bias` on rank 1, before anything can hang.
"""

from __future__ import annotations

import torch.distributed as dist
from digits_training import DigitNet, batch, loss, optimizer, wrap
from torch import Tensor, nn

__all__ = ["batch", "loss", "model", "optimizer", "wrap"]


class RankDependent(DigitNet):
    def __init__(self) -> None:
        super().__init__()
        self.confidence = nn.Linear(64, 1)

    def forward(self, images: Tensor) -> Tensor:
        features = self.features(images)
        logits = self.head(features)
        if dist.is_initialized() and dist.get_rank() == 1:
            return logits
        return logits * self.confidence(features).sigmoid()


def model() -> RankDependent:
    return RankDependent()
