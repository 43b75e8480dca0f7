"""fp16_compress_hook overflows on large gradients.

float16 ends at 65504. A loss that is a sum, or a loss scale of a gradient scaler, goes beyond it: the reduced
gradient is infinite, and the parameters are lost.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP302",
    "subjects": ["0.weight", "0.bias", "2.weight", "2.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "fp16_compress_hook",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return 1e6 * (model(batch)[:, 0] - batch.sum(1)).square().mean()


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-9)


def wrap(module: nn.Module, device: torch.device) -> nn.Module:
    wrapped = DistributedDataParallel(module)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


broken = Recipe(model=model, batch=batch, loss=loss, optimizer=optimizer, wrap=wrap)
fixed = Recipe(model=model, batch=batch, loss=loss, optimizer=optimizer)
