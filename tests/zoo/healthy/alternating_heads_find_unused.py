"""Two heads that take turns, with `find_unused_parameters=True`, which is what that option is for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ddp_kwargs = {"find_unused_parameters": True}


class Alternating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(2))

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.heads[task](self.encoder(x).tanh())


def model() -> nn.Module:
    return Alternating()


def batch(step: int) -> dict[str, Tensor]:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return {"x": x, "task": torch.full((12,), step % 2)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"], int(batch["task"][0]))[:, 0] - batch["x"].sum(1)).square().mean()
