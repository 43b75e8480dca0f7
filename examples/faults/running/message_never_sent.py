"""A rank receives what no rank sends.

Point-to-point messages pair up by source and order. A receive without its send waits for ever, and the rank's peers
wait in their next collective.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP402",
    "subjects": ["step 0: forward"],
    "ranks": [1],
    "severity": "error",
    "timeout": 5,
    "cause": "recv",
}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def receiving(model: nn.Module, batch: Tensor, sends: bool) -> Tensor:
    seed = torch.zeros(1)
    if dist.is_initialized() and rank() == 0 and sends:
        dist.send(seed, dst=1)
    if rank() == 1:
        dist.recv(seed, src=0)
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


broken = Recipe(model=model, batch=batch, loss=lambda model, batch: receiving(model, batch, False))
fixed = Recipe(model=model, batch=batch, loss=lambda model, batch: receiving(model, batch, True))
