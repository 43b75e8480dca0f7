"""The baseline of a policy gradient, which the loss keeps, is the average of each rank's own rewards.

From the second step on every rank measures its samples against a baseline of its own.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP216",
    "subjects": ["baseline"],
    "ranks": [1],
    "severity": "error",
    "cause": "changes in the steps",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def make_loss(*, reduce: bool):
    baseline = torch.zeros(())

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        nonlocal baseline
        score = model(batch)[:, 0]
        reward = -(score.detach() - batch.sum(1)).square()
        value = -((reward - baseline) * score).mean()
        mean = reward.mean()
        if reduce and dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        baseline = 0.5 * baseline + 0.5 * mean
        return value

    return loss


broken = Recipe(model=model, batch=batch, loss=make_loss(reduce=False))
fixed = Recipe(model=model, batch=batch, loss=make_loss(reduce=True))
