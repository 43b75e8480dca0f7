"""forward returns a dict of tensors and of other things."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, *, features: Tensor) -> dict[str, Any]:
        hidden = self.encoder(features).tanh()
        return {"hidden": hidden, "prediction": self.head(hidden)[:, 0], "attentions": None, "name": "named"}


def model() -> nn.Module:
    return Named()


def batch(step: int) -> dict[str, Tensor]:
    features = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return {"features": features, "target": features.sum(1)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(features=batch["features"])
    return (output["prediction"] - batch["target"]).square().mean() + output["hidden"].square().mean()
