"""Metrics through the functional collectives, and features gathered through them with their gradient."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    output = model(batch)[:, 0]
    if dist.is_initialized():
        name = dist.group.WORLD.group_name
        metric = torch.ops._c10d_functional.all_reduce(output.detach().mean(), "sum", name)
        torch.ops._c10d_functional.wait_tensor(metric)
        output = functional.all_gather_tensor_autograd(output, 0, dist.group.WORLD)
        batch = functional.all_gather_tensor(batch, 0, dist.group.WORLD)
    return (output - output.mean() - batch.sum(1)).square().mean()
