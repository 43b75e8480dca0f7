"""One number is added to all logits: its gradient is zero, and what rounding leaves of it is any multiple of itself."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + 1e4 * self.shift


def model() -> nn.Module:
    return Net()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, 4, (8,), generator=generator)
    return torch.randn(8, 8, generator=generator), labels


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])
