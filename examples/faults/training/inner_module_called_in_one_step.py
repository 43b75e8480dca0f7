"""One step calls the module inside the wrapper.

That step alone is not averaged; from then on every rank trains a model of its own.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP501",
    "subjects": ["forward"],
    "ranks": [],
    "severity": "error",
    "cause": "calls the wrapped module and not the wrapper",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> dict[str, Tensor]:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return {"x": x, "step": torch.full((12,), step)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"])[:, 0] - batch["x"].sum(1)).square().mean()


def past_the_wrapper_once(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return loss(getattr(model, "module", model) if batch["step"][0] == 1 else model, batch)


broken = Recipe(model=model, batch=batch, loss=past_the_wrapper_once)
fixed = Recipe(model=model, batch=batch, loss=loss)
