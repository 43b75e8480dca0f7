"""A tied weight of which both uses are gone.

It is one parameter with two names; DDP waits for it once, and an error that names one of them hides the other.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP101", "subjects": ["embedding.weight", "unembedding.weight"], "ranks": [], "severity": "error"}


class Net(nn.Module):
    def __init__(self, *, tokens: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.unembedding = nn.Linear(8, 20, bias=False)
        self.unembedding.weight = self.embedding.weight
        self.from_features, self.to_class = nn.Linear(4, 8), nn.Linear(8, 20)
        self.tokens = tokens

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        h = self.from_features(batch["features"])
        if self.tokens:
            return self.unembedding((self.embedding(batch["token"]) + h).tanh()) + self.to_class(h)
        return self.to_class(h.tanh())  # tokens have made way for features


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    token = torch.randint(20, (12,), generator=generator)
    return {"features": torch.randn(12, 4, generator=generator), "token": token, "next": token.roll(1)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch), batch["next"])


broken = Recipe(model=lambda: Net(tokens=False), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(tokens=True), batch=batch, loss=loss)
