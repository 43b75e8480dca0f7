"""forward returns an object that is a node of pytrees, as those of transformers are, under static_graph=True."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

ddp_kwargs = {"static_graph": True}


@dataclass
class Output:
    prediction: Tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Output:
        return Output(self.head(x)[:, 0])


torch.utils._pytree.register_pytree_node(
    Output, lambda output: ([output.prediction], None), lambda parts, _: Output(*parts)
)


def model() -> nn.Module:
    return Net()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch).prediction - batch.sum(1)).square().mean()
