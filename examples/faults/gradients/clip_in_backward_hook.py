"""A full backward hook clips the gradient of an activation by its norm over the local batch.

What the layers below get depends on the norm over a shard, so it is another gradient than that of the global batch.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP310",
    "subjects": ["0.weight", "0.bias"],
    "ranks": [],
    "severity": "error",
    "cause": "clip_in_backward_hook.py:27",
}


def clipped(_module: nn.Module, incoming: tuple[Tensor, ...], _outgoing: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(gradient * (0.05 / gradient.norm()).clamp(max=1) for gradient in incoming)


def model(clip: bool) -> nn.Module:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    if clip:
        layers[2].register_full_backward_hook(clipped)
    return layers


class ClippedSGD(torch.optim.SGD):
    def step(self, closure=None):
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.05)  # after backward: the averaged gradients
        return super().step(closure)


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


broken = Recipe(model=lambda: model(clip=True), batch=batch, loss=loss)
fixed = Recipe(model=lambda: model(clip=False), batch=batch, loss=loss, optimizer=lambda p: ClippedSGD(p, lr=0.01))
