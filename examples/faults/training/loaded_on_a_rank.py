"""Rank 0 loads a checkpoint after wrapping.

DDP broadcasts parameters when it is constructed and never again: the other ranks keep their start values.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP515",
    "subjects": ["0.weight", "0.bias", "2.weight", "2.bias"],
    "ranks": [0],
    "severity": "error",
    "cause": "after the wrapper had synchronised them",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def load(module: nn.Module) -> None:
    if dist.get_rank() == 0:
        module.load_state_dict({name: tensor + 0.1 for name, tensor in module.state_dict().items()})


def too_late(module: nn.Module, device: torch.device) -> nn.Module:
    wrapped = DistributedDataParallel(module)
    load(module)
    return wrapped


def in_time(module: nn.Module, device: torch.device) -> nn.Module:
    load(module)
    return DistributedDataParallel(module)


broken = Recipe(model=model, batch=batch, loss=loss, wrap=too_late)
fixed = Recipe(model=model, batch=batch, loss=loss, wrap=in_time)
