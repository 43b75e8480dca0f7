"""A hook adds different noise on every rank to the local gradient.

The noise that is left after averaging shrinks with the number of ranks: the privacy or the exploration that it is
there for is no longer what was configured.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP310",
    "subjects": ["0.weight", "0.bias", "2.weight", "2.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "noise_in_hook.py:24",
}


def model(noisy: bool) -> nn.Module:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    for parameter in layers.parameters() if noisy else ():
        parameter.register_hook(lambda gradient: gradient + 0.1 * torch.randn_like(gradient))
    return layers


class NoisySGD(torch.optim.SGD):
    def step(self, closure=None):
        noise = torch.Generator().manual_seed(17)  # the same on every rank
        for parameter in self.param_groups[0]["params"]:
            parameter.grad += 0.1 * torch.randn(parameter.shape, generator=noise)
        return super().step(closure)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: model(noisy=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: model(noisy=False), batch=batch, loss=loss, optimizer=lambda p: NoisySGD(p, lr=0.01))
