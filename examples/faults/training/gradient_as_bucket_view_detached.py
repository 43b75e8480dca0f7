"""An optimizer detaches gradients in place, gradient_as_bucket_view=True.

With the option gradients are views into DDP's buckets, and detach_() of a view raises. Optimizers of before torch 1.7
do so in zero_grad.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP401",
    "subjects": ["step 1: zero_grad"],
    "ranks": [],
    "severity": "error",
    "cause": "Can't detach views in-place",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


class Old(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = False) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.detach_()
                parameter.grad.zero_()


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


view = {"gradient_as_bucket_view": True}
broken = Recipe(model=model, batch=batch, loss=loss, optimizer=lambda p: Old(p, lr=0.1), ddp_kwargs=view)
fixed = Recipe(model=model, batch=batch, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), ddp_kwargs=view)
