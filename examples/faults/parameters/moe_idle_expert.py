"""A mixture of experts in which one expert gets no token.

Routing has collapsed: what no token reaches has no gradient on any rank. Called with no tokens, it would have zeros.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP101", "subjects": ["experts.2.weight", "experts.2.bias"], "ranks": [], "severity": "error"}


class Net(nn.Module):
    def __init__(self, *, balanced: bool) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 1)
        if not balanced:
            nn.init.constant_(self.router.bias[2], -100)
        self.balanced = balanced

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(1).max(1)
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = choice == index
            if mine.any() or self.balanced:
                mixed[mine] = weight[mine, None] * expert(x[mine]).tanh()
        return self.head(x + mixed)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(balanced=False), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(balanced=True), batch=batch, loss=loss)
