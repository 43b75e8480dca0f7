"""A delayed gradient is reduced before it is there: the hooked parameter's comes first in backward.

DDP does not wait for that all-reduce on a CPU either, so what is in `.grad` differs from run to run.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": ["DDP302", "DDP301", "DDP303"], "subjects": ["0.weight"], "ranks": [], "severity": "error"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def wrap(module: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(
        module,
        delay_all_reduce_named_params=[("0.weight", module.get_parameter("0.weight"))],
        param_to_hook_all_reduce=module.get_parameter("2.weight"),
    )
