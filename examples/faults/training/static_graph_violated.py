"""static_graph=True, and a layer is left out after the first step.

DDP counts in the first step how often each gradient arrives and waits for as many in every later one. A head that is
only used during warm-up stops training.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP513",
    "subjects": ["extra.weight", "extra.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "static_graph=True promises",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.extra = nn.Linear(8, 1)

    def forward(self, x: Tensor, warmup: bool) -> Tensor:
        hidden = self.body(x).tanh()
        return self.head(hidden) + self.extra(hidden) if warmup else self.head(hidden)


def batch(step: int) -> dict[str, Tensor]:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return {"x": x, "step": torch.full((12,), step)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    warmup = bool(batch["step"][0] == 0)
    return (model(batch["x"], warmup)[:, 0] - batch["x"].sum(1)).square().mean()


broken = Recipe(model=Net, batch=batch, loss=loss, ddp_kwargs={"static_graph": True})
fixed = Recipe(model=Net, batch=batch, loss=loss, ddp_kwargs={"find_unused_parameters": True})
