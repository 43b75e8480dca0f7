"""Each rank averages the parameters after another number of steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP223", "subjects": ["averager period"]}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def wrap(module: nn.Module, device: torch.device) -> nn.Module:
    wrapped = DistributedDataParallel(module)
    own, _ = dist.new_subgroups(group_size=1)
    wrapped.register_comm_hook(PostLocalSGDState(None, own, 1), post_localSGD_hook)
    return wrapped


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    averager = PeriodicModelAverager(period=2 + dist.get_rank(), warmup_steps=1)
    return PostLocalSGDOptimizer(torch.optim.SGD(parameters, lr=0.1, momentum=0.9), averager)
