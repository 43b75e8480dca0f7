"""A layer is frozen after wrapping.

DDP waits for the gradient of every parameter that required one when it was constructed; the next forward raises.
"""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP503",
    "subjects": ["0.weight", "0.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "frozen after wrapping",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def change(module: nn.Module) -> None:
    module[0].requires_grad_(False)


def too_late(module: nn.Module, device: torch.device) -> nn.Module:
    wrapped = DistributedDataParallel(module)
    change(module)
    return wrapped


def in_time(module: nn.Module, device: torch.device) -> nn.Module:
    change(module)
    return DistributedDataParallel(module)


broken = Recipe(model=model, batch=batch, loss=loss, wrap=too_late)
fixed = Recipe(model=model, batch=batch, loss=loss, wrap=in_time)
