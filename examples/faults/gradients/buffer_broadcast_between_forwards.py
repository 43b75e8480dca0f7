"""The buffer broadcast of a second forward overwrites what the backward of the first one needs.

The broadcast leaves the version counter alone, so autograd does not notice, and all ranks but the first get a wrong
gradient.
"""

import torch
from torch import Tensor, nn

from ddpcheck import Recipe

EXPECT = {
    "code": "DDP311",
    "subjects": ["scale"],
    "ranks": [],
    "severity": "error",
    "cause": "buffer_broadcast_between_forwards.py:25",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor, of_sample: bool) -> Tensor:
        if of_sample:
            self.scale.copy_(x.detach()[0].abs() + 0.5)
        return self.head(self.body(x).tanh() * self.scale)


class Fixed(Net):
    def forward(self, x: Tensor, of_sample: bool) -> Tensor:
        return self.head(self.body(x).tanh() * self.scale.clone())


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    prediction = model(batch, of_sample=True) + model(batch.flip(1), of_sample=False)
    return (prediction - batch.sum(1, keepdim=True)).square().mean()


broken = Recipe(model=Net, batch=batch, loss=loss)
fixed = Recipe(model=Fixed, batch=batch, loss=loss)
