"""One rank calls the module inside the wrapper.

The others wait for its gradients for ever, or until the timeout of the process group.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP501",
    "subjects": ["forward"],
    "ranks": [1],
    "severity": "error",
    "cause": "the other ranks wait",
    "timeout": 5,
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def past_the_wrapper_on_rank_1(model: nn.Module, batch: Tensor) -> Tensor:
    inner = getattr(model, "module", model)
    return loss(inner if dist.is_initialized() and dist.get_rank() == 1 else model, batch)


broken = Recipe(model=model, batch=batch, loss=past_the_wrapper_on_rank_1)
fixed = Recipe(model=model, batch=batch, loss=loss)
