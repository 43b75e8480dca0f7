"""Parameter groups hold other parameters on one rank.

Both ranks have the same groups with the same options and the same counts; which parameters are decayed differs, so
the models part after the first step.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP223",
    "subjects": ["group 0 parameters", "group 1 parameters"],
    "ranks": [1],
    "severity": "error",
    "cause": "2.weight",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def grouped(parameters: list[nn.Parameter], decayed: int) -> torch.optim.Optimizer:
    rest = [p for p in parameters if p is not parameters[decayed]]
    return torch.optim.SGD([{"params": [parameters[decayed]], "weight_decay": 0.1}, {"params": rest}], lr=0.01)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=model, batch=batch, loss=loss, optimizer=lambda p: grouped(list(p), decayed=2 * rank()))
fixed = Recipe(model=model, batch=batch, loss=loss, optimizer=lambda p: grouped(list(p), decayed=0))
