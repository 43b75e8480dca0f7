"""An output object in which DDP finds no tensor.

The search for unused parameters starts at the tensors of the output. DDP looks into tensors, lists, tuples, dicts and
dataclasses; from any other object it concludes that nothing was used.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {"code": "DDP112", "subjects": ["Output"], "ranks": [], "severity": "error"}


class Output:
    def __init__(self, prediction: Tensor) -> None:
        self.prediction = prediction


@dataclass
class DataOutput:
    prediction: Tensor


class Net(nn.Module):
    def __init__(self, output: type) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])
        self.output = output
        self.calls = 0

    def forward(self, x: Tensor) -> Output | DataOutput:
        self.calls += 1
        return self.output(self.heads[self.calls % 2](self.body(x).tanh())[:, 0])


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch).prediction - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: Net(Output), batch=batch, loss=loss, ddp_kwargs={"find_unused_parameters": True})
fixed = Recipe(model=lambda: Net(DataOutput), batch=batch, loss=loss, ddp_kwargs={"find_unused_parameters": True})
