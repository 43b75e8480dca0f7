"""Two heads that take turns from step to step.

In each step DDP waits for the head that is not used. A second task trained every other batch looks like this.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP105",
    "subjects": ["heads.0.weight", "heads.0.bias", "heads.1.weight", "heads.1.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "heads.1",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.heads[step % 2](self.body(x).tanh())


def batch(step: int) -> dict[str, Tensor]:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return {"x": x, "step": torch.full((12,), step)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"], int(batch["step"][0]))[:, 0] - batch["x"].sum(1)).square().mean()


broken = Recipe(model=Net, batch=batch, loss=loss)
fixed = Recipe(model=Net, batch=batch, loss=loss, ddp_kwargs={"find_unused_parameters": True})
