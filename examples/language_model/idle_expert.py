"""The language model with a mixture of experts whose loop stops one expert too early.

The router learns to send text to an expert that never runs: ddpcheck reports DDP101 (unused-parameter) for the four
parameters of `blocks.1.feed_forward.experts.2`.
"""

from __future__ import annotations

from language_training import WIDTH, LanguageModel, batch, loss
from torch import Tensor, nn

__all__ = ["batch", "loss", "model"]


class MixtureOfExperts(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        mixed = [share[..., i, None] * self.experts[i](x) for i in range(len(self.experts) - 1)]  # one too few
        return sum(mixed[1:], mixed[0])


def model() -> LanguageModel:
    language_model = LanguageModel()
    language_model.blocks[1].feed_forward = MixtureOfExperts()
    return language_model
