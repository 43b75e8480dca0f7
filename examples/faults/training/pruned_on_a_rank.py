"""Rank 0 prunes its weights during training.

Parameters are never broadcast after construction: the other ranks go on with the weights that rank 0 has removed.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP515",
    "subjects": ["0.weight"],
    "ranks": [0],
    "severity": "error",
    "cause": "changed on rank 0 alone",
}


class Net(nn.Sequential):
    def __init__(self, *, everywhere: bool) -> None:
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.everywhere = everywhere

    def prune(self) -> None:
        if self.everywhere or not dist.is_initialized() or dist.get_rank() == 0:
            with torch.no_grad():
                self[0].weight[self[0].weight.abs() < 0.1] = 0.0

    def forward(self, x: Tensor, prune: bool) -> Tensor:
        if prune:
            self.prune()
        return super().forward(x)


def batch(step: int) -> dict[str, Tensor]:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return {"x": x, "step": torch.full((12,), step)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    prediction = model(batch["x"], prune=int(batch["step"][0]) == 1)
    return (prediction[:, 0] - batch["x"].sum(1)).square().mean()


broken = Recipe(model=lambda: Net(everywhere=False), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(everywhere=True), batch=batch, loss=loss)
