"""The learning rate of the first step is zero, and gradients are zeroed after every step."""

import torch
import torch.nn as nn


def model():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step):
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def loss(model, batch):
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


class Warmup(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        self.param_groups[0]["lr"] = 0.01 * Warmup.steps
        Warmup.steps += 1
        super().step(closure)
        self.zero_grad()


def optimizer(parameters):
    return Warmup(parameters, lr=0.0)
