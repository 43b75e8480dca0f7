"""Every gradient is zero, because a mask leaves nothing of the batch.

A comparison of zeros with zeros passes whatever DDP does, so it proves nothing.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP307", "subjects": ["loss"], "ranks": [], "severity": "error", "cause": "nothing was compared"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(share: float):
    def make(step: int) -> dict[str, Tensor]:
        x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
        return {"x": x, "kept": (torch.arange(12) % 4 < 4 * share).to(x.dtype)}

    return make


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return ((model(batch["x"])[:, 0] - batch["x"].sum(1)).square() * batch["kept"]).mean()


broken = Recipe(model=model, batch=batch(0.0), loss=loss)
fixed = Recipe(model=model, batch=batch(0.5), loss=loss)
