"""A layer that only the last step leaves out.

DDP notices a missing gradient at the next forward. After the last step there is none: the step is taken with gradients
that no rank has averaged, and the ranks save different models.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP105",
    "subjects": ["adapter.weight", "adapter.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "step 2",
}


class Net(nn.Module):
    def __init__(self, *, last: int) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.adapter = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.last = last

    def forward(self, x: Tensor, step: int) -> Tensor:
        h = self.body(x).tanh()
        return self.head(h + self.adapter(h) if step < self.last else h)


def batch(step: int) -> dict[str, Tensor]:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return {"x": x, "step": torch.full((12,), step)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"], int(batch["step"][0]))[:, 0] - batch["x"].sum(1)).square().mean()


broken = Recipe(model=lambda: Net(last=2), batch=batch, loss=loss)
fixed = Recipe(model=lambda: Net(last=1000), batch=batch, loss=loss)
