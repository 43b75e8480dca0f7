"""A communication hook hands back the local bucket.

A hook that filters, logs or skips small buckets, and returns what it got, leaves out the reduction: each rank trains
on its own gradients.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP301",
    "subjects": ["0.weight", "0.bias", "2.weight", "2.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "communication hook",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def keeping(state, bucket):  # no annotations: DDP compares them with the types themselves
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


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


broken = Recipe(model=model, batch=batch, loss=loss, wrap=lambda module, device: wrap(module, device, keeping))
fixed = Recipe(model=model, batch=batch, loss=loss, wrap=lambda module, device: wrap(module, device, averaging))
