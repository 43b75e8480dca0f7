"""An inner loop (MAML) by autograd.grad and functional_call runs past the wrapper.

Neither autograd.grad nor functional_call on the inner module passes through DDP, so the outer gradient is local.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP501",
    "subjects": ["forward"],
    "ranks": [],
    "severity": "error",
    "cause": "calls the wrapped module and not the wrapper",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def adapted(module: nn.Module, batch: Tensor) -> Tensor:
    """The loss of each task on its second half, after one step on its first."""
    losses = []
    for task in batch:
        weights = dict(module.named_parameters())
        first, second = task.chunk(2)
        inner = (functional_call(module, weights, (first,))[:, 0] - first.sum(1)).square().mean()
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        faster = {name: p - 0.05 * slope for (name, p), slope in zip(weights.items(), slopes, strict=True)}
        losses.append((functional_call(module, faster, (second,))[:, 0] - second.sum(1)).square().mean())
    return torch.stack(losses)


class Meta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, batch: Tensor) -> Tensor:
        return adapted(self.net, batch)


def batch(step: int) -> Tensor:
    return torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(step))


def past_the_wrapper(model: nn.Module, batch: Tensor) -> Tensor:
    return adapted(getattr(model, "module", model), batch).mean()


broken = Recipe(model=model, batch=batch, loss=past_the_wrapper)
fixed = Recipe(model=Meta, batch=batch, loss=lambda model, batch: model(batch).mean())
