"""A guard on the local loss skips the optimizer's step.

The rank that skips keeps its old weights while the others move on; from then on their models differ.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP508",
    "subjects": ["0.weight", "0.bias", "2.weight", "2.bias"],
    "ranks": [1],
    "severity": "error",
    "cause": "did not change on rank 1",
}


class Guarded:
    """Trains on what does not explode."""

    def __init__(self, *, together: bool) -> None:
        self.together = together
        self.worst = torch.zeros(())

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        errors = (model(batch)[:, 0] - batch.sum(1)).square()
        self.worst = errors.detach().max()
        return errors.mean()

    def optimizer(self, parameters) -> torch.optim.Optimizer:
        sgd = torch.optim.SGD(parameters, lr=0.01)
        step = sgd.step

        def guarded_step(closure=None) -> None:
            if self.together:
                dist.all_reduce(self.worst, op=dist.ReduceOp.MAX)
            if self.worst < 100:
                step(closure)

        sgd.step = guarded_step
        return sgd


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    x[-1] += 10.0 if step == 1 else 0.0  # an outlier, which goes to the last rank
    return x


def recipe(task: Guarded) -> Recipe:
    return Recipe(model=model, batch=batch, loss=task.loss, optimizer=task.optimizer)


broken = recipe(Guarded(together=False))
fixed = recipe(Guarded(together=True))
