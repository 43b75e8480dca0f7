"""The head is tied to the embedding in the first forward pass, when DDP knows both.

DDP waits for the gradient of the head's own tensor, which is gone, and the next forward pass raises.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP503",
    "subjects": ["head.weight"],
    "ranks": [],
    "severity": "error",
    "cause": "replaced by embedding.weight in the forward pass",
}


class LanguageModel(nn.Module):
    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.tied = not late
        if not late:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.tied:
            self.head.weight = self.embedding.weight
            self.tied = True
        return self.head(self.embedding(tokens))


def batch(step: int) -> Tensor:
    return torch.randint(20, (12, 6), generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


broken = Recipe(model=lambda: LanguageModel(late=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: LanguageModel(late=False), batch=batch, loss=loss)
