"""A communication hook adds up and does not divide.

A hook replaces the whole reduction, division included. Every gradient is W times too large, on every rank alike, so
no comparison of ranks shows it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP303",
    "subjects": ["0.weight", "0.bias", "2.weight", "2.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "the world size",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def adding(state, bucket):  # no annotations: DDP compares them with the types themselves
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def averaging(state, bucket):
    future = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def wrap(module: nn.Module, device: torch.device, hook: Callable[..., Any]) -> nn.Module:
    wrapped = DistributedDataParallel(module)
    wrapped.register_comm_hook(None, hook)
    return wrapped


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=model, batch=batch, loss=loss, wrap=lambda module, device: wrap(module, device, adding))
fixed = Recipe(model=model, batch=batch, loss=loss, wrap=lambda module, device: wrap(module, device, averaging))
