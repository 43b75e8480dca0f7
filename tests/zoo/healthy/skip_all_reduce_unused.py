"""A head that the data of rank 1 does not need is not waited for; the loss weighs each head by the global count."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ddp_kwargs = {"skip_all_reduce_unused_params": True, "find_unused_parameters": True}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.spare = nn.Linear(8, 1)

    def forward(self, x: Tensor, spare: bool) -> Tensor:
        hidden = self.body(x).tanh()
        return self.head(hidden) + self.spare(hidden) if spare else self.head(hidden)


def model() -> nn.Module:
    return Net()


def batch(step: int) -> dict[str, Tensor]:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return {"x": x, "step": torch.full((12,), step)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(batch["x"], bool(batch["step"][0] % 2 == 0))
    return (output[:, 0] - batch["x"].sum(1)).square().mean()
