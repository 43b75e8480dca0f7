"""The optimizer is made before a layer is replaced.

It goes on to update the tensors of the old layer, which nobody uses; the new layer never moves.
"""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP504",
    "subjects": ["2.weight", "2.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "2 tensors that are no parameters of the module",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


class Task:
    """Makes model and optimizer, in this order or in that."""

    def __init__(self, *, optimizer_first: bool) -> None:
        self.optimizer_first = optimizer_first

    def wrap(self, module: nn.Module, device: torch.device) -> nn.Module:
        if self.optimizer_first:
            self.parameters = list(module.parameters())
        module[2] = nn.Linear(8, 1)
        if not self.optimizer_first:
            self.parameters = list(module.parameters())
        return DistributedDataParallel(module)

    def recipe(self) -> Recipe:
        return Recipe(model=model, batch=batch, loss=loss, wrap=self.wrap, optimizer=self.optimizer)

    def optimizer(self, _parameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters, lr=0.01)


broken = Task(optimizer_first=True).recipe()
fixed = Task(optimizer_first=False).recipe()
