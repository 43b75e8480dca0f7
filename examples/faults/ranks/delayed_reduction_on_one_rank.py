"""delay_all_reduce_named_params is set on one rank only.

The delayed parameters leave the reducer, so that the ranks disagree on how many there are, and the constructor waits
in a broadcast that the others never enter.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP221",
    "subjects": ["delay_all_reduce_named_params", "param_to_hook_all_reduce"],
    "ranks": [1],
    "severity": "error",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def wrap(module: nn.Module, device: torch.device, delayed: bool) -> nn.Module:
    if not delayed:
        return DistributedDataParallel(module)
    return DistributedDataParallel(
        module,
        delay_all_reduce_named_params=[("2.weight", module[2].weight)],
        param_to_hook_all_reduce=module[0].weight,
    )


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=model, batch=batch, loss=loss, wrap=lambda module, device: wrap(module, device, rank() == 1))
fixed = Recipe(model=model, batch=batch, loss=loss, wrap=lambda module, device: wrap(module, device, False))
