"""Stochastic depth drawn on every rank separately.

Each rank skips other blocks: a rank that uses one waits for the gradient of the rank that skipped it.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP104",
    "subjects": [
        "blocks.0.weight",
        "blocks.0.bias",
        "blocks.1.weight",
        "blocks.1.bias",
        "blocks.2.weight",
        "blocks.2.bias",
        "blocks.3.weight",
        "blocks.3.bias",
    ],
    "ranks": [],
    "severity": "error",
}


class Net(nn.Module):
    def __init__(self, *, every_rank_for_itself: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 1)
        self.every_rank_for_itself = every_rank_for_itself

    def forward(self, x: Tensor, step: int) -> Tensor:
        generator = None if self.every_rank_for_itself else torch.Generator().manual_seed(step)
        for block, draw in zip(self.blocks, torch.rand(4, generator=generator), strict=True):
            if draw < 0.5:
                x = x + block(x).tanh()
        return self.head(x)


def batch(step: int) -> dict[str, Tensor]:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return {"x": x, "step": torch.full((12,), step)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"], int(batch["step"][0]))[:, 0] - batch["x"].sum(1)).square().mean()


broken = Recipe(model=lambda: Net(every_rank_for_itself=True), batch=batch, loss=loss)
fixed = Recipe(
    model=lambda: Net(every_rank_for_itself=False),
    batch=batch,
    loss=loss,
    ddp_kwargs={"find_unused_parameters": True},  # a block that is skipped is skipped on every rank
)
